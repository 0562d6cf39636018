// CPU kernels. Torch-free, single-threaded per batch row, bitwise equal to ops/reference.py.
#pragma once

#include "hisparse/params.h"

namespace hisparse::cpu {

void resolve(const ResolveParams& params);
void fetch(const FetchParams& params);
void write_pages(const PagesParams& params);
void read_pages(const PagesParams& params);
void gather_pages(const GatherParams& params);
void write_words(const WordsParams& params);
void forget(const ForgetParams& params);

}  // namespace hisparse::cpu
