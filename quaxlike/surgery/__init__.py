"""What is done to a whole model: find its weights, adapt, quantise, merge and count them."""
