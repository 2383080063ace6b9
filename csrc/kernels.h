// The kernels of one instruction set: included by one source file each, inside a namespace of its own.
//
// Everything here has internal linkage and uses no template of the standard library, so that no function compiled for
// a newer processor can be linked into the code of an older one.

namespace {

#include "philox.h"
#include "exponential.h"
#include "adjust.h"
#include "entries.h"
#include "weights.h"
#include "row.h"
#include "onepass.h"
#include "unfiltered.h"
#include "select.h"
#include "filter.h"
#include "nucleus.h"
#include "bracket.h"
#include "statistics.h"
#include "emit.h"
#include "subtract.h"
#include "residual.h"
#include "sample.h"
#include "round.h"
#include "verify.h"

}  // namespace
