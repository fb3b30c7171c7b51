"""Jobs of this machine: their ranks, trainers and ops."""
