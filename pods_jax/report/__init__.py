"""From a run folder to one HTML page that needs no network."""
