#include "shm/stall_detector.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "shm/text.h"

namespace horo {
namespace {

constexpr size_t kTextBytes = 240;
constexpr size_t kReasonBytes = 1000;
constexpr int kSlots =
    8;  // simultaneous waits of a rank: its blocking call and its asynchronous operations, in the world and subgroups
constexpr int kLate = 32;
// A rank that has waited for less counts as running.
constexpr int64_t kWaitingNs = 500'000'000;
constexpr int64_t kOthersNs = 2'000'000'000;
// A waiting rank checks many times per second. After a longer pause, it was itself stopped, as a suspended job is.
constexpr int64_t kStoppedNs = 2'000'000'000;
// Stacks are requested from at most this many late ranks, with limits of time and size for each.
constexpr size_t kStacks = 4;
constexpr int kStackMilliseconds = 1000;
constexpr size_t kStackBytes = 16 * 1024;

int64_t ns_of(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

void sleep_ms(int milliseconds) {
  timespec pause{milliseconds / 1000, milliseconds % 1000 * 1'000'000L};
  nanosleep(&pause, nullptr);
}

std::string duration(int64_t ns) {
  const double s = std::max(0.0, static_cast<double>(ns) * 1e-9);
  char text[32];
  if (s < 9.95) std::snprintf(text, sizeof(text), "%.1f s", s);
  else if (s < 600) std::snprintf(text, sizeof(text), "%.0f s", s);
  else std::snprintf(text, sizeof(text), "%.0f min", s / 60);
  return text;
}

std::string file_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// R, S, D, T and so on, as in /proc; '?' if it is not known.
char state_of(int pid) {
  const std::string stat = file_text("/proc/" + std::to_string(pid) + "/stat");
  const size_t after_name = stat.rfind(')');
  return after_name == std::string::npos || after_name + 2 >= stat.size() ? '?' : stat[after_name + 2];
}

bool catches(int pid, int signal) {
  const std::string status = file_text("/proc/" + std::to_string(pid) + "/status");
  const size_t at = status.find("SigCgt:");
  if (at == std::string::npos) return false;
  return std::strtoull(status.c_str() + at + 7, nullptr, 16) >> (signal - 1) & 1;
}

// One thread per block; first the one that ran the signal handler, which is the main thread if possible.
std::string arranged(const std::string& dump) {
  std::vector<std::string> blocks;
  for (size_t begin = 0; begin < dump.size();) {
    const size_t end = std::min(dump.find("\n\n", begin), dump.size());
    const std::string block = dump.substr(begin, end - begin);
    if (block.find("Current thread") != std::string::npos) blocks.insert(blocks.begin(), block);
    else blocks.push_back(block);
    begin = end + 2;
  }
  std::string text;
  for (const std::string& block : blocks) {
    std::istringstream lines(block);
    for (std::string line; std::getline(lines, line);) {
      if (!line.empty()) text += "\n    " + line;
    }
  }
  if (text.size() > kStackBytes) text = text.substr(0, text.rfind('\n', kStackBytes)) + "\n    ... and more";
  return text;
}

void print(const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (n < 0 && errno != EINTR) return;
    done += static_cast<size_t>(std::max<ssize_t>(n, 0));
  }
}

}  // namespace

std::string ranks_text(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i != 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += (last > i + 1 ? "-" : ", ") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

struct alignas(64) StallDetector::Board {
  std::atomic<int64_t> reported_ns;  // when the last report was made
  std::atomic<int64_t> pause_ns;     // until the next one, without progress
  std::atomic<int32_t> is_open;      // a stall was reported, but not its end
  std::atomic<int32_t> n_reporting;
  std::atomic<int32_t> stalled;  // 1: the reason is being written; 2: it is complete
  SharedText<kReasonBytes> reason;
};

struct StallDetector::Slot {
  std::atomic<int64_t> since_ns;  // 0: unused
  std::atomic<int32_t> n_late;
  std::atomic<int32_t> late[kLate];
  SharedText<kTextBytes> what;
};

struct alignas(64) StallDetector::Row {
  std::atomic<int64_t> doing_ns;
  SharedText<kTextBytes> doing;
  std::atomic<int64_t> announced_ns;
  std::atomic<int64_t> expected_ns;
  SharedText<kTextBytes> announced;
  std::atomic<int32_t> stack_signal;  // 0: it provides no stacks
  std::atomic<int32_t> stack_fd;
  Slot slots[kSlots];
};

struct StallDetector::Waiting {
  int rank;
  int64_t since_ns;
  std::string what;
  std::vector<int> late;
};

size_t StallDetector::memory_bytes(int size) {
  const size_t n = static_cast<size_t>(size);
  return sizeof(Board) + n * sizeof(Row) + n * n * 2 * sizeof(int64_t);
}

StallDetector::StallDetector(uint8_t* memory, int rank, std::vector<int> hosts, std::vector<int> pids,
                             std::vector<std::string> names)
    : memory_(memory), rank_(rank), hosts_(std::move(hosts)), pids_(std::move(pids)), names_(std::move(names)) {}

StallDetector::Board& StallDetector::board() const { return *reinterpret_cast<Board*>(memory_); }

StallDetector::Row& StallDetector::row(int rank) const {
  return *reinterpret_cast<Row*>(memory_ + sizeof(Board) + static_cast<size_t>(rank) * sizeof(Row));
}

std::atomic<int64_t>* StallDetector::waits_of(int rank) const {
  const size_t n = static_cast<size_t>(size());
  uint8_t* waits = memory_ + sizeof(Board) + n * sizeof(Row);
  return reinterpret_cast<std::atomic<int64_t>*>(waits) + static_cast<size_t>(rank) * n * 2;
}

thread_local int64_t StallDetector::thread_abort_ns = 0;
thread_local std::function<StallDetector::Overdue(int64_t)> StallDetector::overdue_of_others;

void StallDetector::set_limits(double warn_s, double abort_s) {
  warn_ns_ = ns_of(warn_s);
  abort_ns_ = ns_of(abort_s);
}

void StallDetector::give_stacks(int fd, int signal) {
  row(rank_).stack_fd = fd;
  row(rank_).stack_signal = signal;
}

int64_t StallDetector::clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void StallDetector::doing(const std::string& what, int64_t now_ns) {
  Row& own = row(rank_);
  own.doing.set(what);
  own.doing_ns.store(now_ns, std::memory_order_release);
}

void StallDetector::announce(int rank, const std::string& what, double expect_s) {
  Row& theirs = row(rank);
  const int64_t now = clock_ns();
  theirs.announced.set(what);
  theirs.announced_ns = now;
  // After that, the rank has as much time as if all had begun to wait only now.
  theirs.expected_ns = now + (what.empty() ? warn_ns_.load() : ns_of(expect_s));
}

std::string StallDetector::scope(const std::vector<int>& ranks) const {
  return static_cast<int>(ranks.size()) == size() ? "" : " of " + ranks_text(ranks);
}

// --- stragglers ---

void StallDetector::waited_for(int rank, int64_t ns) {
  std::atomic<int64_t>* own = waits_of(rank_) + 2 * rank;
  own[0].fetch_add(1, std::memory_order_relaxed);
  own[1].fetch_add(ns, std::memory_order_relaxed);
}

int64_t StallDetector::running_ns(int64_t since_ns, int64_t until_ns) const {
  const std::lock_guard lock(mutex_);
  int64_t ns = until_ns - since_ns;
  for (auto stop = stops_.rbegin(); stop != stops_.rend() && stop->second > since_ns; ++stop) {
    ns -= std::max<int64_t>(0, std::min(stop->second, until_ns) - std::max(stop->first, since_ns));
  }
  return ns;
}

int64_t StallDetector::look(int64_t seen_ns) {
  const int64_t now = clock_ns();
  if (now - seen_ns > kStoppedNs) {
    const std::lock_guard lock(mutex_);
    if (!stops_.empty()) seen_ns = std::max(seen_ns, stops_.back().second);  // several waits may notice the same stop
    if (seen_ns < now) stops_.emplace_back(seen_ns, now);
  }
  return now;
}

std::vector<Lateness> StallDetector::lateness() const {
  std::vector<Lateness> all(size());
  for (int r = 0; r < size(); ++r) {
    int n_others = 0;
    for (int other = 0; other < size(); ++other) {
      if (other == r || !is_here(other)) continue;
      ++n_others;
      const std::atomic<int64_t>* seen = waits_of(other) + 2 * r;
      all[r].n_last = std::max(all[r].n_last, seen[0].load(std::memory_order_relaxed));
      all[r].waited_s += static_cast<double>(seen[1].load(std::memory_order_relaxed)) * 1e-9;
    }
    all[r].waited_s /= std::max(1, n_others);
  }
  return all;
}

// --- the board ---

StallDetector::Wait::Wait(std::shared_ptr<StallDetector> detector, int64_t since_ns)
    : detector_(std::move(detector)), since_ns_(since_ns), seen_ns_(clock_ns()) {}

StallDetector::Wait::~Wait() {
  if (slot_ >= 0) detector_->row(detector_->rank_).slots[slot_].since_ns.store(0, std::memory_order_release);
}

int64_t StallDetector::Wait::look() {
  if (detector_ != nullptr) seen_ns_ = detector_->look(seen_ns_);
  return seen_ns_;
}

void StallDetector::Wait::over() {
  const int64_t now = look();
  if (slot_ < 0 || detector_->board().reported_ns < since_ns_ || detector_->board().is_open.exchange(0) == 0) return;
  print("[horo_lite] rank " + std::to_string(detector_->rank_) + " continues after waiting for " +
        duration(detector_->running_ns(since_ns_, now)) + "\n");
}

void StallDetector::Wait::report_if_due(const std::string& what, const std::vector<int>& arrived,
                                        const std::vector<int>& late) {
  if (detector_ == nullptr) return;
  detector_->check();
  // Nothing below reads the clock again: the next call finds a stop after this one.
  const int64_t now = look(), since = now - detector_->running_ns(since_ns_, now);
  Row& own = detector_->row(detector_->rank_);
  for (int i = 0; slot_ < 0 && i < kSlots; ++i) {
    int64_t nobody = 0;
    if (own.slots[i].since_ns.compare_exchange_strong(nobody, since)) slot_ = i;
  }
  if (slot_ < 0) return;
  Slot& slot = own.slots[slot_];
  slot.since_ns.store(since, std::memory_order_release);
  const size_t n = std::min<size_t>(late.size(), kLate);
  std::vector<int> elsewhere;
  std::copy_if(arrived.begin(), arrived.end(), std::back_inserter(elsewhere),
               [&](int r) { return !detector_->is_here(r); });
  slot.what.set(what + (elsewhere.empty() ? "" : " (on other hosts " + ranks_text(elsewhere) + ", too)"));
  for (size_t i = 0; i < n; ++i) slot.late[i].store(late[i], std::memory_order_relaxed);
  slot.n_late.store(static_cast<int32_t>(n), std::memory_order_release);
  if (detector_->report_or_stall(since, now, detector_->is_reporter(arrived, late))) resume();
}

// One host reports: that of a late rank, which can get its stacks; if no rank waits there, that of the first to wait.
bool StallDetector::is_reporter(const std::vector<int>& arrived, const std::vector<int>& late) const {
  if (std::any_of(late.begin(), late.end(), [&](int r) { return is_here(r); })) return true;
  if (arrived.empty() || *std::min_element(arrived.begin(), arrived.end()) != rank_) return false;
  return late.empty() || std::any_of(late.begin(), late.end(), [&](int r) {
           return std::none_of(arrived.begin(), arrived.end(), [&](int c) { return hosts_[c] == hosts_[r]; });
         });
}

std::vector<StallDetector::Waiting> StallDetector::waiting() const {
  std::vector<Waiting> waits;
  for (int r = 0; r < size(); ++r) {
    for (const Slot& slot : row(r).slots) {
      const int64_t since = slot.since_ns.load(std::memory_order_acquire);
      if (since == 0) continue;
      const int n = std::clamp(slot.n_late.load(std::memory_order_acquire), 0, kLate);
      waits.push_back({r, since, slot.what.get(), std::vector<int>(slot.late, slot.late + n)});
    }
  }
  return waits;
}

// The ranks that others wait for and that do not wait.
std::vector<int> StallDetector::late(const std::vector<Waiting>& waits) const {
  const int64_t now = clock_ns();
  std::set<int> awaited, still;
  for (const Waiting& wait : waits) {
    awaited.insert(wait.late.begin(), wait.late.end());
    if (now - wait.since_ns > std::min(kWaitingNs, warn_ns_.load() / 2)) still.insert(wait.rank);
  }
  // A rank that was stopped while it waited does not notice that its wait has ended.
  std::erase_if(still, [&](int r) { return awaited.contains(r) && is_stopped(r); });
  std::vector<int> late;
  std::set_difference(awaited.begin(), awaited.end(), still.begin(), still.end(), std::back_inserter(late));
  return late;
}

bool StallDetector::is_stopped(int rank) const {
  const char state = is_here(rank) && pids_[rank] != 0 ? state_of(pids_[rank]) : '?';
  return state == 'T' || state == 't';
}

// --- the report ---

bool StallDetector::all_excused(const std::vector<int>& late, int64_t now) const {
  return !late.empty() && std::all_of(late.begin(), late.end(), [&](int r) { return row(r).expected_ns.load() > now; });
}

// The limit that a wait of this thread has exceeded, or will exceed first.
StallDetector::Overdue StallDetector::overdue(int64_t since_ns, int64_t now) const {
  Overdue most = overdue_of_others ? overdue_of_others(now) : Overdue{};
  for (const int64_t abort_ns : {abort_ns_.load(), thread_abort_ns}) {
    const int64_t by_ns = now - since_ns - abort_ns;
    if (abort_ns != 0 && (most.abort_ns == 0 || by_ns > most.by_ns)) most = {abort_ns, by_ns};
  }
  return most;
}

// Returns whether it has reported.
bool StallDetector::report_or_stall(int64_t since_ns, int64_t now, bool is_reporter) {
  const int64_t warn_ns = warn_ns_;
  const Overdue overdue = this->overdue(since_ns, now);
  // A host that cannot report much lets another one end the job, for a while.
  const bool over = overdue.abort_ns != 0 && overdue.by_ns > (is_reporter ? 0 : kOthersNs);
  const bool noticed = warn_ns != 0 && now - since_ns > warn_ns;
  if (!over && !noticed) return false;
  const std::vector<Waiting> waits = waiting();
  const std::vector<int> late = this->late(waits);
  if (all_excused(late, now)) return false;

  Board& board = this->board();
  board.n_reporting.fetch_add(1);
  int64_t reported = board.reported_ns;
  const bool known = reported >= since_ns;  // this wait has been reported
  const bool due = known ? noticed && now > reported + board.pause_ns : true;
  // Of those for which it is time, only one reports.
  const bool reports = due && is_reporter && board.reported_ns.compare_exchange_strong(reported, now);
  if (reports) {
    board.pause_ns = known ? 2 * board.pause_ns : std::max(warn_ns, int64_t{1'000'000'000});
    board.is_open = 1;
    print(report(since_ns));
  }
  board.n_reporting.fetch_sub(1);
  if (!over) return reports;

  // The job must not end before a report is complete.
  for (int i = 0; board.n_reporting != 0 && i < 5000; ++i) sleep_ms(1);
  std::string reason = "nothing has moved for " + duration(overdue.abort_ns) + " (stall_abort_s): ";
  reason += late.empty() ? "the ranks wait for each other" : ranks_text(late) + " did not arrive";
  size_t n_elsewhere = 0;
  for (const int r : late) {
    if (is_here(r)) {
      reason += "; rank " + std::to_string(r) + last_call(r, now);
    } else if (n_elsewhere++ < kStacks) {
      reason += "; " + names_[r] + " is late, or its host cannot be reached";
    }
  }
  stall(reason + "; " + who_waits(waits, now));
  check();
  return reports;
}

void StallDetector::stall(const std::string& reason) {
  int32_t nobody = 0;
  if (board().stalled.compare_exchange_strong(nobody, 1)) {
    board().reason.set(reason);
    board().stalled = 2;
  }
}

void StallDetector::check() const {
  if (board().stalled.load(std::memory_order_acquire) == 2) throw Stalled(board().reason.get());
}

// "ranks 0, 2 have waited 31 s in … for rank 1; rank 3 …"
std::string StallDetector::who_waits(const std::vector<Waiting>& waits, int64_t now) const {
  std::map<std::pair<std::string, std::vector<int>>, std::pair<std::vector<int>, int64_t>> alike;
  for (const Waiting& wait : waits) {
    auto& [ranks, since] = alike[{wait.what, wait.late}];
    since = ranks.empty() ? wait.since_ns : std::min(since, wait.since_ns);
    ranks.push_back(wait.rank);
  }
  std::string text;
  for (const auto& [wait, who] : alike) {
    text += (text.empty() ? "" : "; ") + ranks_text(who.first) + (who.first.size() == 1 ? " has" : " have") +
            " waited " + duration(now - who.second) + " in " + wait.first;
    if (!wait.second.empty()) text += " for " + ranks_text(wait.second);
  }
  return text;
}

std::string StallDetector::last_call(int rank, int64_t now) const {
  const Row& theirs = row(rank);
  const int64_t at = theirs.doing_ns.load(std::memory_order_acquire);
  if (at == 0) return is_here(rank) ? " has made no call yet" : "";
  return " was last in " + theirs.doing.get() + ", which it reached " + duration(now - at) + " ago";
}

std::string StallDetector::report(int64_t since_ns) const {
  const int64_t now = clock_ns();
  const std::vector<Waiting> waits = waiting();
  const std::vector<int> late = this->late(waits);
  std::string text = "[horo_lite] stalled for " + duration(now - since_ns) + ": ";
  text +=
      late.empty() ? "the ranks wait for each other" : ranks_text(late) + (late.size() == 1 ? " is late" : " are late");
  std::string lines = who_waits(waits, now);
  for (size_t at = 0; (at = lines.find("; ", at)) != std::string::npos;) lines.replace(at, 2, "\n  ");
  text += "\n  " + lines + "\n";
  // If all wait, show where.
  std::set<int> shown(late.begin(), late.end());
  for (const Waiting& wait : waits) {
    if (late.empty()) shown.insert(wait.rank);
  }
  size_t n_stacks = 0;
  for (const int r : shown) {
    text += "  " + names_[r] + last_call(r, now);
    const int64_t announced = row(r).announced_ns;
    if (!row(r).announced.empty()) {
      text += " (it announced '" + row(r).announced.get() + "' " + duration(now - announced) + " ago, for " +
              duration(row(r).expected_ns - announced) + " at most)";
    }
    text += (n_stacks++ < kStacks ? stacks(r) : "") + "\n";
  }
  if (abort_ns_ == 0) text += "  The job keeps waiting; HORO_LITE_STALL_ABORT_S=600 would end it after 600 s.\n";
  return text;
}

// Returns the rest of a sentence about the rank, followed by separate lines.
std::string StallDetector::stacks(int rank) const {
  const int pid = pids_[rank];
  if (!is_here(rank)) {
    return " is on another host, where no rank waits and could get its stacks, or which cannot be reached; py-spy dump "
           "--pid " +
           std::to_string(pid) + " shows its stacks there";
  }
  if (pid == 0) return "";
  const std::string proc = "/proc/" + std::to_string(pid);
  switch (state_of(pid)) {
    case 'T':
      return "; it is stopped (SIGSTOP or Ctrl-Z), and kill -CONT " + std::to_string(pid) + " resumes it";
    case 't':
      return "; it is stopped by a debugger";
    case 'Z':
      return "; it is dead";
  }
  const int signal = row(rank).stack_signal;
  const std::string path = proc + "/fd/" + std::to_string(row(rank).stack_fd);
  char target[64] = {};
  // A process that does not catch the signal would be killed by it.
  if (signal == 0 || !catches(pid, signal) || readlink(path.c_str(), target, sizeof(target) - 1) < 0 ||
      std::strncmp(target, "/memfd:", 7) != 0) {
    return "; it does not provide its stacks";
  }
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return "; its stacks cannot be read by this process";
  std::string dump;
  struct stat status{};
  if (ftruncate(fd, 0) == 0 && kill(pid, signal) == 0) {
    constexpr int kStep = 20;
    for (int waited = 0; waited < kStackMilliseconds; waited += kStep) {
      const off_t before = status.st_size;
      sleep_ms(kStep);
      if (fstat(fd, &status) != 0 || (status.st_size != 0 && status.st_size == before)) break;
    }
    dump.resize(static_cast<size_t>(status.st_size));
    const ssize_t n = pread(fd, dump.data(), dump.size(), 0);
    dump.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  }
  close(fd);
  if (!dump.empty()) return "; its Python stacks:" + arranged(dump);
  std::string where = file_text(proc + "/wchan");
  where = where.empty() || where == "0" ? "" : " in " + where;
  return std::string("; it does not react to signals, and its state in /proc is ") + state_of(pid) + where;
}

}  // namespace horo
