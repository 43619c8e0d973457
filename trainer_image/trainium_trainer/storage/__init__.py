"""Where durable checkpoints live: the protocol of a store, folders and S3 buckets behind it."""
