#include "hosts/peer_status.h"

#include <algorithm>
#include <charconv>
#include <cstring>

namespace horo {
namespace {

enum Tag : int { kLeft = 1, kGaveUp = 2, kStalled = 3, kArrived = 4, kAnnounced = 5 };

constexpr size_t kTextBytes = 480;
// MPI moves messages only in calls, and a probe may check before it does: so check this often for messages that peers
// may have sent long ago.
constexpr int kLooks = 10;
// A rank that waits longer reports that it has arrived; repeatedly, since it may be stopped.
constexpr int64_t kArrivedNs = 250'000'000, kAgainNs = 10'000'000'000;
constexpr int64_t kFreshNs = 25'000'000'000;

// Truncates a text to n_bytes, by default those of a message, between two characters.
std::string fitting(const std::string& text, size_t n_bytes = kTextBytes) {
  size_t n = std::min(text.size(), n_bytes);
  while (n > 0 && n < text.size() && (static_cast<uint8_t>(text[n]) & 0xC0) == 0x80) --n;
  return text.substr(0, n);
}

template <class Number>
std::string text_of(Number number) {
  char digits[64];
  return {digits, std::to_chars(digits, digits + sizeof(digits), number).ptr};
}

// Removes the number at the beginning of `text`, and the space after it, and returns the number.
template <class Number>
Number take(std::string& text) {
  Number number{};
  const auto end = std::from_chars(text.data(), text.data() + text.size(), number).ptr;
  text.erase(0, std::min(text.size(), static_cast<size_t>(end - text.data()) + 1));
  return number;
}

}  // namespace

PeerStatus::PeerStatus(std::shared_ptr<ControlChannel> control, ShmGroup& host, std::shared_ptr<StallDetector> detector,
                       int rank, std::vector<int> ranks, std::vector<std::string> names)
    : control_(std::move(control)),
      host_(host),
      detector_(std::move(detector)),
      rank_(rank),
      ranks_(std::move(ranks)),
      names_(std::move(names)),
      scope_(detector_->scope(ranks_)),
      n_records_(ranks_.size()) {}

void PeerStatus::begin(const std::string& label, uint32_t flags) {
  const std::lock_guard lock(mutex_);
  is_between_ = label.empty();
  if (!label.empty()) label_ = label;
  flags_ = flags;
  ++n_begun_;
  began_ns_ = StallDetector::clock_ns();
}

void PeerStatus::set_label(const std::string& label) {
  const std::lock_guard lock(mutex_);
  is_between_ = false;
  label_ = label;
}

std::string PeerStatus::label() const {
  const std::lock_guard lock(mutex_);
  return label_;
}

int64_t PeerStatus::began_ns() const {
  const std::lock_guard lock(mutex_);
  return began_ns_;
}

// What this rank is in; "": between two. Under the mutex.
std::string PeerStatus::operation() const { return is_between_ ? "" : label_; }

// --- from the peers ---

// Processes what peers have sent since the last call.
void PeerStatus::update() {
  // One thread at a time, so that none takes a peer for dead while another thread holds its last message.
  if (!is_receiving_.exchange(true)) {
    struct Over {
      std::atomic<bool>& is_receiving;
      ~Over() { is_receiving = false; }
    } over{is_receiving_};
    const std::vector<int> ended = control_->ended();  // must precede receive(), which returns their last messages
    const std::vector<ShortMessage> messages = control_->receive();
    const std::lock_guard lock(mutex_);
    for (const ShortMessage& message : messages) note(message);
    for (const int peer : ended) {
      if (lost_.empty() && !left_.contains(peer)) lost_ = names_[peer] + " died (its connection has ended)";
    }
  }
}

void PeerStatus::receive() {
  {
    const std::lock_guard lock(mutex_);
    if (said_.contains(kLeft)) {  // another thread has ended the world or the program
      throw PeerLost(names_[rank_] + " has left while it " + PeerLost::doing(operation()));
    }
  }
  update();
  detector_->check();
}

void PeerStatus::note(const ShortMessage& message) {
  std::string text = message.text;
  switch (message.tag) {
    case kGaveUp:
      if (lost_.empty()) lost_ = text;
      break;
    case kStalled:
      detector_->stall(text);
      break;
    case kArrived: {
      const auto n_begun = take<uint64_t>(text);
      arrivals_[message.peer] = {n_begun, take<uint32_t>(text), StallDetector::clock_ns()};
      break;
    }
    case kAnnounced: {
      const auto expect_s = take<double>(text);
      detector_->announce(ranks_[message.peer], text, expect_s);
      break;
    }
    case kLeft: {
      const auto n_begun = take<uint64_t>(text);
      const auto n_records = take<int64_t>(text);
      left_[message.peer] = {n_begun, n_records, text};
      break;
    }
  }
}

// Under the mutex.
void PeerStatus::check_lost(const std::string& operation) const {
  if (lost_.empty()) return;
  detector_->check();  // a rank that gives up since nothing has moved says so first
  throw PeerLost(lost_, names_[rank_], operation);
}

void PeerStatus::check_all() {
  receive();
  std::string operation;
  {
    const std::lock_guard lock(mutex_);
    operation = this->operation();
    check_lost(operation);
    for (const auto& [peer, left] : left_) {
      // A peer that was in this operation had completed its part when it left, and its messages are on their way.
      if (left.n_begun < n_begun_) {
        throw PeerLost(names_[peer] + " has left (" + left.reason + ")", names_[rank_], operation);
      }
    }
  }
  host_.check_peers(-1, operation);
}

void PeerStatus::check_one(int peer, const std::string& name) {
  receive();
  {
    const std::lock_guard lock(mutex_);
    check_lost(name);
    if (const auto found = left_.find(peer); found != left_.end()) {
      throw PeerLost(names_[peer] + " has left (" + found->second.reason + ")", names_[rank_], name);
    }
  }
  host_.check_peers(-1, name);
  send_arrived();  // others may still wait in that operation
}

bool PeerStatus::has_left(int peer, int64_t n_records) {
  receive();
  const std::lock_guard lock(mutex_);
  const auto found = left_.find(peer);
  return found != left_.end() && found->second.n_records <= n_records;
}

// --- to the peers ---

void PeerStatus::report_wait(StallDetector::Wait& wait) {
  const std::vector<uint32_t> entered = this->entered();
  const std::string label = this->label();
  std::vector<int> here, late;
  for (size_t r = 0; r < ranks_.size(); ++r) (entered[r] != 0 ? here : late).push_back(ranks_[r]);
  if (label == kJoin) detector_->check();
  else wait.report_if_due(label + scope_, here, late);
}

std::vector<uint32_t> PeerStatus::entered() {
  send_arrived();
  const std::lock_guard lock(mutex_);
  const int64_t now = StallDetector::clock_ns();
  std::vector<uint32_t> flags(ranks_.size());
  for (const auto& [peer, arrival] : arrivals_) {
    if (arrival.n_begun >= n_begun_ && now - arrival.ns < kFreshNs) flags[peer] = arrival.flags | kEntered;
  }
  flags[rank_] = flags_ | kEntered;
  return flags;
}

// Tells peers which operation this rank is in, if it has been in it for a while.
void PeerStatus::send_arrived() {
  uint64_t n_begun;
  uint32_t flags;
  {
    const std::lock_guard lock(mutex_);
    const int64_t now = StallDetector::clock_ns();
    n_begun = n_begun_;
    flags = flags_;
    const bool is_due = now - began_ns_ > kArrivedNs && (arrival_.n_begun < n_begun || now - arrival_.ns > kAgainNs);
    if (!is_due) return;
    arrival_ = {n_begun, flags, now};
  }
  control_->send(to_all(text_of(n_begun) + " " + text_of(flags)), kArrived);
}

void PeerStatus::announce(const std::string& what, double expect_s) {
  control_->send(to_all(fitting(text_of(expect_s) + " " + what)), kAnnounced);
}

void PeerStatus::count_record(int peer) {
  const std::lock_guard lock(mutex_);
  ++n_records_[peer];
}

void PeerStatus::abandon(const std::string& reason) {
  host_.abandon(reason);
  try {
    detector_->check();
  } catch (const Stalled& stalled) {
    say_once(to_all(fitting(stalled.what())), kStalled);
  }
  const std::string who = names_[rank_] + " gave up (";
  say_once(to_all(who + fitting(reason, kTextBytes - who.size() - 1) + ")"), kGaveUp);
}

void PeerStatus::pass_on(const std::string& cause) {
  host_.pass_on(cause);
  say_once(to_all(fitting(cause)), kGaveUp);
}

void PeerStatus::leave(const std::string& reason) {
  host_.leave(reason);
  if (control_->is_over()) return;
  std::map<int, std::string> texts = to_all("");
  try {
    for (int i = 0; i < kLooks; ++i) update();
  } catch (const PeerLost&) {  // some are dead
  }
  {
    const std::lock_guard lock(mutex_);
    // Peers that have left would not receive it, and UCX warns of such messages when MPI ends.
    for (const auto& [peer, _] : left_) texts.erase(peer);
    // Tells peers that wait for this rank why it leaves, if they have not been told yet.
    const std::string why = lost_.empty() ? reason : reason + " after " + lost_;
    for (auto& [peer, text] : texts) text = fitting(text_of(n_begun_) + " " + text_of(n_records_[peer]) + " " + why);
  }
  say_once(texts, kLeft);
}

void PeerStatus::say_once(const std::map<int, std::string>& texts, int tag) {
  if (control_->is_over()) return;
  {
    const std::lock_guard lock(mutex_);
    if (!said_.insert(tag).second) return;
  }
  try {
    control_->send(texts, tag);
  } catch (const PeerLost&) {  // some are dead
  }
}

std::map<int, std::string> PeerStatus::to_all(const std::string& text) const {
  std::map<int, std::string> texts;
  for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
    if (r != rank_) texts[r] = text;
  }
  return texts;
}

}  // namespace horo
