"""From a configuration to a run that is ready for its next step."""
