// How an operator is exported: one function of one pointer, for both dtypes.

#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))
#define OPERATOR(name, Args)                       \
    EXPORT void ps_##name(const Args* args) {       \
        if (args->dtype == 0)                      \
            name<float>(*args);                    \
        else                                       \
            name<bf16>(*args);                     \
    }
