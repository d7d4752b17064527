"""DeepSpeed's native ops for the CPU, function for function, over the core."""
