// The CPU operators with a plain C interface: one pointer to a packed struct of 8-byte fields each.
// No Python or torch: pointers, strides and counts. Built and loaded by native.py. The linears are in
// operators_linear.cpp and attention in operators_attention.cpp, so that the three compile in parallel.
//
// Three rules hold in all of it:
// - Memory that a mask excludes is never read: unused table entries, unwritten tails of blocks.
// - A row's result has one order of summation, whatever the other rows are and however many threads
//   share the work: reductions are written out with explicit vectors, and work is cut at absolute
//   positions, never by batch size or thread count.
// - Storage is fp32 or bf16 (dtype 0 or 1); arithmetic is fp32. Strides are in elements. A KV cache
//   may be of codes and fp16 scales (attention/kv_codes.h).

#include "delta.h"
#include "matmul/expert_rows.h"
#include "export.h"
#include "gather.h"
#include "neurons.h"
#include "rowwise.h"
#include "sampling.h"
#include "text_match.h"

OPERATOR(rms_norm, RmsNormArgs)
OPERATOR(rope, RopeArgs)
OPERATOR(rope_to, RopeToArgs)
OPERATOR(act_mul, ActMulArgs)
OPERATOR(swiglu, SwigluArgs)
OPERATOR(quantize, QuantizeArgs)
OPERATOR(combine, CombineArgs)
OPERATOR(hadamard, HadamardArgs)
OPERATOR(delta, DeltaArgs)
OPERATOR(gate_mul, GateMulArgs)
OPERATOR(unpack_neurons, UnpackArgs)
OPERATOR(neuron_mlp, NeuronArgs)

EXPORTED(sample, SampleArgs) { sample(*args); }
EXPORTED(soft_cap, SoftCapArgs) { soft_cap(*args); }
EXPORTED(gather, GatherArgs) { gather(*args); }
EXPORTED(index_text, IndexTextArgs) { index_text(*args); }
EXPORTED(match_text, MatchTextArgs) { match_text(*args); }

// Calls of exported functions, as kernels/cpu/replay.py recorded them.
struct Call {
    void (*function)(const void*);
    const void* args;
};
struct RunArgs {
    const Call* calls;
    int64_t count;
};
LAYOUT(RunArgs, FIELD(calls) FIELD(count))
EXPORTED(run, RunArgs) {
    for (int64_t i = 0; i < args->count; ++i) args->calls[i].function(args->calls[i].args);
}
