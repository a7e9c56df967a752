"""What lets other projects use zerocast by their own configurations."""
