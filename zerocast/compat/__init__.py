"""What lets code that was written for another project run on zerocast: that project's names."""
