// The kernels of one instruction set: included by one source file each, inside a namespace of its own.
//
// Everything here has internal linkage and uses no template of the standard library, so that no function compiled for
// a newer processor can be linked into the code of an older one.

namespace {

#include "philox.h"
#include "exponential.h"
#include "adjust.h"
#include "entries.h"
#include "select.h"
#include "shard_sum.h"
#if defined(SPECKER_LANES)
#include "power.h"
#include "chunks_lanes.h"
#else
#include "chunks_plain.h"
#endif
#include "weights.h"
#include "row.h"
#include "onepass.h"
#include "unfiltered.h"
#include "filter.h"
#include "nucleus.h"
#include "bracket.h"
#include "statistics.h"
#include "emit.h"
#include "subtract.h"
#if defined(SPECKER_LANES)
#include "subtract_lanes.h"
#else
#include "subtract_plain.h"
#endif
#include "fast_residual.h"
#include "residual.h"
#include "sample.h"
#include "round.h"
#include "verify.h"

}  // namespace
