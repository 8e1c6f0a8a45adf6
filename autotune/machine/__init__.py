"""The current state of the machine: host, GPU, CPU load and page cache."""
