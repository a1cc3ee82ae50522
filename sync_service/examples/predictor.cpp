// A predictor in C++ over a mirror: its threads read the shared memory that `deltasync mirror` keeps up to date.
//
//     include=$(python -c 'import deltasync.client.shared as shared; print(shared.__path__[0])')
//     g++ -std=c++17 -O2 -pthread -I "$include" predictor.cpp -o predictor
//     printf '%s\n' '3 14' '3 159' | ./predictor NAME user item 4
//
// Each line of input is a raw id of the first table and one of the second one. The answer has both, the version that
// answers, and the dot product of their rows, `missing`, or `late`. Answers come in any order.
#include "deltasync_shared.h"

#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <optional>
#include <queue>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Request {
    int64_t user, item;
};

// Requests in the order in which they came.
class Requests {
public:
    void put(Request request) {
        std::lock_guard<std::mutex> guard(lock_);
        waiting_.push(request);
        changed_.notify_one();
    }
    void close() {
        std::lock_guard<std::mutex> guard(lock_);
        closed_ = true;
        changed_.notify_all();
    }
    std::optional<Request> take() {
        std::unique_lock<std::mutex> guard(lock_);
        changed_.wait(guard, [this] { return closed_ || !waiting_.empty(); });
        if (waiting_.empty()) return std::nullopt;
        Request next = waiting_.front();
        waiting_.pop();
        return next;
    }

private:
    std::mutex lock_;
    std::condition_variable changed_;
    std::queue<Request> waiting_;
    bool closed_ = false;
};

void check(int code) {
    if (code == DELTASYNC_OK) return;
    std::fprintf(stderr, "%s\n", deltasync_text(code));
    std::_Exit(1);
}

// Attempts at an answer.
constexpr int most_tries = 2;

// The answer from one whole version, without copying rows. If the mirror had to write over it, it is not used.
std::string answer(deltasync_reader *reader, const char *users, const char *items, Request request) {
    char text[128];
    for (int tries = 0; tries < most_tries; tries++) {
        deltasync_version version;
        deltasync_table user, item;
        check(deltasync_pin(reader));
        int code = deltasync_newest(reader, &version);
        if (!code) code = deltasync_find(reader, users, &user);
        if (!code) code = deltasync_find(reader, items, &item);
        if (code && code != DELTASYNC_TORN) check(code);
        if (!code) {
            if (std::string(user.dtype) != "<f4" || std::string(item.dtype) != "<f4" || user.dim != item.dim) {
                std::fprintf(stderr, "expected tables of fp32 with the same number of values in a row\n");
                std::_Exit(1);
            }
            int64_t left = deltasync_row_of(&user, request.user), right = deltasync_row_of(&item, request.item);
            if (left < 0 || right < 0) {
                std::snprintf(text, sizeof text, "%" PRId64 " %" PRId64 " %" PRIu64 " missing", request.user,
                              request.item, version.version);
            } else {
                auto first = reinterpret_cast<const float *>(user.values) + left * user.dim;
                auto second = reinterpret_cast<const float *>(item.values) + right * item.dim;
                float score = 0;
                for (uint32_t at = 0; at < user.dim; at++) score += first[at] * second[at];
                std::snprintf(text, sizeof text, "%" PRId64 " %" PRId64 " %" PRIu64 " %a", request.user, request.item,
                              version.version, static_cast<double>(score));
            }
        }
        int released = deltasync_release(reader);
        if (released == DELTASYNC_OK) return text;
        if (released != DELTASYNC_TORN) check(released);
    }
    std::snprintf(text, sizeof text, "%" PRId64 " %" PRId64 " 0 late", request.user, request.item);
    return text;
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 5) {
        std::fprintf(stderr, "usage: %s NAME TABLE TABLE THREADS\n", arguments[0]);
        return 2;
    }
    Requests requests;
    std::mutex output;
    std::vector<std::thread> pool;
    for (int number = std::atoi(arguments[4]); number > 0; number--)
        pool.emplace_back([&] {
            deltasync_reader *reader;
            check(deltasync_attach(&reader, arguments[1]));
            while (std::optional<Request> request = requests.take()) {
                deltasync_reader *next;
                if (deltasync_is_removed(reader) && deltasync_attach(&next, arguments[1]) == DELTASYNC_OK) {
                    deltasync_detach(reader);
                    reader = next;
                }
                std::string text = answer(reader, arguments[2], arguments[3], *request);
                std::lock_guard<std::mutex> guard(output);
                std::cout << text << std::endl;
            }
            deltasync_detach(reader);
        });
    Request request;
    while (std::cin >> request.user >> request.item) requests.put(request);
    requests.close();
    for (std::thread &each : pool) each.join();
    return 0;
}
