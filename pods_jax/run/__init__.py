"""The run folder while it grows: metrics, rollouts, progress, checkpoints."""
