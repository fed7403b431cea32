// Attention over a paged KV cache, with the C interface of operators.cpp, whose rules apply here too.

#include "attention/decode.h"
#include "attention/kv_write.h"
#include "attention/prefill.h"
#include "export.h"

OPERATOR(write_kv, WriteArgs)
OPERATOR(decode, AttentionArgs)
OPERATOR(prefill, AttentionArgs)

EXPORTED(rope_write_kv, RopeWriteArgs) {
    if (args->write.dtype == 0)
        rope_write_kv<float>(*args);
    else
        rope_write_kv<bf16>(*args);
}
