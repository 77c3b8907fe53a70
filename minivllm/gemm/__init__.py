"""Matrix products: which one runs for a dtype and a shape, and our own in Triton beside the libraries'.

a [M, K], b [N, K] (a weight as it lies in a checkpoint: "NT")  ->  a b^T [M, N]

quantize.py      numbers in 8 bits, and the scales that go with them
dispatch.py      the table of backends: who serves, who does not and why
libraries.py     cuBLAS, CUTLASS and DeepGEMM behind one signature, and the reference
triton_bf16.py   fp8_block.py   int8.py      our kernels; tiles.py is what they share
grouped.py       many products at once, one an expert
"""
