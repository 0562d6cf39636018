"""KV groups, block geometry, pools, layout and concurrency bounds: integer functions of the configuration."""
