"""What DeepSpeed's checkpoints and accessors need of Stepwell's state."""
