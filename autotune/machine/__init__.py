"""The machine: host, GPU, CPU load and page cache, as they are now."""
