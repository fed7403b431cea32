// How an operator is exported: one function of one pointer to its argument struct, and a description
// of that struct, which kernels/cpu/arguments.py compares with its own when the library is loaded.

#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Field {
    const char* name;
    size_t offset;
    bool is_double;
};

// The fields of an argument struct, all of 8 bytes. Specialised by LAYOUT next to each struct.
template <class Args>
struct Layout;

template <class Value>
constexpr bool is_double_field() {
    static_assert(sizeof(Value) == 8, "a field of an argument struct has 8 bytes");
    return std::is_same<Value, double>::value;
}

// LAYOUT(RopeArgs, FIELD(dtype) FIELD(q) ...): every field of the struct, in order.
#define FIELD(name) {#name, offsetof(A, name), is_double_field<decltype(((A*)nullptr)->name)>()},
#define LAYOUT(Args, list)                                                              \
    template <>                                                                         \
    struct Layout<Args> {                                                               \
        using A = Args;                                                                 \
        static constexpr Field fields[] = {list};                                       \
    };                                                                                  \
    static_assert(std::size(Layout<Args>::fields) * 8 == sizeof(Args), "a field is not listed");

// "name:offset:type,...", type d (double) or q (integer or pointer).
template <class Args>
const char* describe() {
    static const std::string text = [] {
        std::string all;
        for (const Field& field : Layout<Args>::fields) {
            if (!all.empty()) all += ',';
            all += field.name + (':' + std::to_string(field.offset)) + (field.is_double ? ":d" : ":q");
        }
        return all;
    }();
    return text.c_str();
}

// An operator without a dtype of its own, and one for both dtypes.
#define EXPORTED(name, Args)                                            \
    EXPORT const char* pk_layout_##name() { return describe<Args>(); }  \
    EXPORT void pk_##name(const Args* args)
#define OPERATOR(name, Args)                                            \
    EXPORTED(name, Args) {                                              \
        if (args->dtype == 0)                                           \
            name<float>(*args);                                         \
        else                                                            \
            name<bf16>(*args);                                          \
    }
