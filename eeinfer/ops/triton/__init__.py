"""Triton kernels in the places of the torch functions that `eeinfer.ops.parts` lists.

They are for CUDA GPUs, and run on a CPU, slowly, where TRITON_INTERPRET=1 is set before triton is imported. None waits
for the device or reads it on the host, and no shape depends on what a tensor holds, so all of them can be captured in a
CUDA graph. What changes from step to step is an argument that kernels are not specialised on; what is constant for a
model is a `constexpr`. Offsets into the cache and into rows are int64.

A row's result is the same bits whatever the other rows are: each sum has one order, which depends on nothing but the
row's own length.

Of triton they use `jit` with `do_not_specialize`, `cdiv` and `next_power_of_2`, and of its language `arange`,
`constexpr`, `dot` with `input_precision`, `erf`, `exp`, `full`, `load`, `log`, `max`, `maximum`, `min`, `minimum`,
`num_programs`, `program_id`, `rsqrt`, `sigmoid`, `store`, `sum`, `where`, `zeros` and `to` of tensors.
"""
