"""Operations on a whole model: find its weights, adapt, quantise, merge and count them."""
