"""What lets other projects use zerocast: by their configurations, or by what they call."""
