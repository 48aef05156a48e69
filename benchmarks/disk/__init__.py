"""What the disk benchmarks share: states, the disk's own limit, and honest measuring."""
