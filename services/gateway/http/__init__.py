"""What all HTTP APIs share."""
