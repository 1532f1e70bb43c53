"""What Horovod keeps apart from any framework: errors, process sets and small helpers."""
