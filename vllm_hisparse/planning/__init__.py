"""KV groups, block geometry, pools, memory layout and concurrency bounds: integer functions of the configuration."""
