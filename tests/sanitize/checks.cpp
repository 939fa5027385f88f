// The host's part of the C++ core (csrc/pack, shm, hosts and engine) for the sanitizers (`make sanitize`): ranks are
// threads of this process, their calls are drawn at random from a seed, and every result is compared with oracle.h.
//
//   sanitized [rounds [seed [check]]]
//
// A failure names its check and seed. These repeat the ranks' calls, but not the scheduling of their threads.
#include <unistd.h>

#include "ranks.h"

using namespace horo;

int main(int argc, char** argv) {
  const struct {
    const char* name;
    void (*run)(unsigned seed);
  } checks[] = {
#ifndef __SANITIZE_THREAD__  // these have one thread
      {"kernels", kernels},
      {"replicas", replicas},
#endif
      {"collectives", collectives},
      {"distances", distances},
      {"several_hosts", several_hosts},
      {"engines_of_several_hosts", engines_of_several_hosts},
      {"causes", causes},
      {"losses", losses},
      {"asynchronous", asynchronous},
      {"blocking_calls", blocking_calls},
      {"differing_calls", differing_calls},
      {"progress", progress},
      {"priority", priority},
      {"mismatches", mismatches},
      {"joins", joins},
      {"broken_engines", broken_engines},
      {"broken_calls", broken_calls}};
  const int n_rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  const unsigned first_seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  const std::string only = argc > 3 ? argv[3] : "";
  for (int round = 0; round < n_rounds; ++round) {
    for (const auto& check : checks) {
      if (!only.empty() && only != check.name) continue;
      check_name = check.name;
      check_seed = first_seed + static_cast<unsigned>(round) * 1000;
      alarm(300);  // if a check hangs
      const int64_t begin = StallDetector::clock_ns();
      check.run(check_seed);
      std::printf("%-14s seed %u: %.1f s\n", check_name, check_seed,
                  1e-9 * static_cast<double>(StallDetector::clock_ns() - begin));
      std::fflush(stdout);
    }
  }
}
