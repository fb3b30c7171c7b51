"""What a training script imports: blocking, without an event loop."""
