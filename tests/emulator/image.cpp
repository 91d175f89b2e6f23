// What a "CUBIN" is made of: the device text of the header over the emulator's instructions. All of
// it has internal linkage, because images of other options have other bodies under the same names.

#include "emulator.h"

namespace {

#include "instructions.h"

#include KMLA_EMULATOR_TEXT // facts, argument structs, kernels

} // namespace

extern "C" const emulator::kernel* kmla_emulator_kernels() { return kernels; }
