// Products with packed weights behind the plain C interface of operators.cpp, whose rules hold here, too.

#include "amx_int4.h"
#include "linear.h"
#include "linear_lut.h"
#include "linear_int8.h"
#include "export.h"

OPERATOR(pack, PackArgs)
OPERATOR(linear, LinearArgs)
OPERATOR(linear_int8, Int8LinearArgs)
OPERATOR(linear_codes, CodesLinearArgs)

EXPORT void ps_pack_int8(const Int8PackArgs* args) { pack_int8(*args); }
EXPORT void ps_pack_codes(const CodesPackArgs* args) { pack_codes(*args); }
EXPORT int64_t ps_panel() { return PANEL; }
EXPORT int64_t ps_matrix_unit() { return amx_usable(); }
