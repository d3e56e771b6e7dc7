"""The order in which types that stand for other arrays are asked, where rules of several match.

A type with a larger number is asked first: it is the outer one of a nest, and hands what is inside on to
the others. Types that are not listed have 0.
"""

SPARSE_BESIDE_VALUES = -1
LORA = 1
LORA_OF_CODES = LORA + 1
TRAINABLE_ROWS = LORA + 2
IDENTITY = 9
CONSTANT = 10
UNITFUL = 20
NAMED = 30
