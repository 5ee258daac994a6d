"""Operations that MLX lacks or runs step by step: one operation a file.

Each has a reference in mlx ops, which is the definition, and one kernel body, which Metal and CUDA share; a dispatcher
chooses by device and shape. No Metal machine was at hand: the Metal source is proven by compiling it, character
for character, as C++ over an emulated thread grid (tests/kernels), and its body by the CUDA twin on a GPU.
"""
