"""The daemon's RPC over a unix socket: one call and one reply per connection."""
