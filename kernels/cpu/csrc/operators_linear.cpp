// Products with packed weights, with the C interface of operators.cpp, whose rules apply here too.

#include "matmul/amx_int4_groups.h"
#include "matmul/amx_int8.h"
#include "matmul/amx_integers.h"
#include "matmul/linear.h"
#include "matmul/linear_lut.h"
#include "matmul/pack_codes.h"
#include "matmul/search_int4.h"
#include "export.h"

OPERATOR(pack, PackArgs)
OPERATOR(linear, LinearArgs)
OPERATOR(linear_int8, Int8LinearArgs)
OPERATOR(linear_int4_groups, Int4GroupsArgs)
OPERATOR(linear_codes, CodesLinearArgs)

EXPORTED(pack_int8, Int8PackArgs) { pack_int8(*args); }
EXPORTED(search_int4, Int4SearchArgs) { search_int4(*args); }
EXPORTED(pack_int4, Int4PackArgs) { pack_int4(*args); }
EXPORTED(pack_codes, CodesPackArgs) { pack_codes(*args); }
EXPORT int64_t pk_panel() { return PANEL; }
EXPORT int64_t pk_matrix_unit() { return amx_usable(); }
