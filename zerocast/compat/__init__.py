"""The names of other projects, so that code that was written for them runs on zerocast."""
