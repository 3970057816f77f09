/*
 * Gloo over its ibverbs transport: collectives between all ranks, and messages between two, of which every element is compared.
 * Pairs sleep for their completions at first, and poll for them the second time.
 *
 *     gloo RANK RANKS DIRECTORY      the ranks find each other in the directory
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include <gloo/allgather_ring.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/ibverbs/device.h>

using Elements = std::vector<int32_t>;
using Peers = std::shared_ptr<gloo::Context>;

/* More than a message of the path MTU, and no power of two. */
static const int COUNT = 100003;
static const int ROUNDS = 3;
static const std::chrono::seconds PATIENCE(100);

/* What a rank begins with, in one of the rounds. */
static int32_t element(int rank, int round, size_t at)
{
	return (rank + 1) * (int32_t)(at % 9973) + round * 31 + rank;
}

static int32_t sum(int ranks, int round, size_t at)
{
	int32_t out = 0;

	for (int rank = 0; rank < ranks; rank++)
		out += element(rank, round, at);
	return out;
}

/* In place: what is registered stays where it is. */
static void fill(Elements &out, int rank, int round)
{
	for (size_t at = 0; at < out.size(); at++)
		out[at] = element(rank, round, at);
}

static void check(const char *what, const int32_t *got, size_t count, std::function<int32_t(size_t)> wanted)
{
	for (size_t at = 0; at < count; at++)
		if (got[at] != wanted(at)) {
			fprintf(stderr, "%s: element %zu is %d, not %d\n", what, at, got[at], wanted(at));
			exit(1);
		}
}

/* All algorithms of a context are kept until it ends: the completions of their last sends are looked for in their buffers. */
struct Suite {
	Peers peers;
	int rank, ranks;
	Elements data = Elements(COUNT);
	std::vector<std::unique_ptr<Elements>> memory;
	std::vector<std::unique_ptr<gloo::Algorithm>> kept;

	explicit Suite(Peers of) : peers(of), rank(of->rank), ranks(of->size) {}

	template <typename Algorithm, typename... Args> gloo::Algorithm &make(Args &&...args)
	{
		kept.push_back(std::make_unique<Algorithm>(peers, std::forward<Args>(args)...));
		return *kept.back();
	}

	void barrier() { make<gloo::BarrierAllToAll>().run(); }

	template <typename Algorithm> void allreduce(const char *what)
	{
		auto &algorithm = make<Algorithm>(std::vector<int32_t *>{data.data()}, COUNT);

		for (int round = 0; round < ROUNDS; round++) {
			fill(data, rank, round);
			algorithm.run();
			check(what, data.data(), COUNT, [&](size_t at) { return sum(ranks, round, at); });
			barrier();
		}
	}

	void broadcast()
	{
		for (int root = 0; root < ranks; root++) {
			fill(data, rank, root);
			make<gloo::BroadcastOneToAll<int32_t>>(std::vector<int32_t *>{data.data()}, COUNT, root).run();
			check("broadcast", data.data(), COUNT, [&](size_t at) { return element(root, root, at); });
			barrier();
		}
	}

	void allgather()
	{
		memory.push_back(std::make_unique<Elements>(ranks * COUNT));
		auto &all = *memory.back();

		fill(data, rank, 5);
		make<gloo::AllgatherRing<int32_t>>(std::vector<const int32_t *>{data.data()}, all.data(), COUNT).run();
		for (int of = 0; of < ranks; of++)
			check("allgather", &all[of * COUNT], COUNT, [&](size_t at) { return element(of, 5, at); });
		barrier();
	}

	/* The last rank gets what is left over. */
	void reduce_scatter()
	{
		int part = COUNT / ranks;
		std::vector<int> parts(ranks, part);

		parts.back() = COUNT - part * (ranks - 1);
		fill(data, rank, 6);
		make<gloo::ReduceScatterHalvingDoubling<int32_t>>(std::vector<int32_t *>{data.data()}, COUNT, parts).run();
		check("reduce-scatter", data.data(), parts[rank], [&](size_t at) { return sum(ranks, 6, rank * part + at); });
		barrier();
	}

	/* Every rank sends the middle of its elements to the one on its right, at another offset. */
	void messages()
	{
		const size_t from = 1000, to = 3000, length = 50001, size = sizeof(int32_t);
		int slot = peers->nextSlot(), left = (rank + ranks - 1) % ranks, right = (rank + 1) % ranks;
		Elements sent(COUNT), came(COUNT);
		auto sender = peers->getPair(right)->createSendBuffer(slot, sent.data(), COUNT * size);
		auto receiver = peers->getPair(left)->createRecvBuffer(slot, came.data(), COUNT * size);

		for (int round = 0; round < ROUNDS; round++) {
			fill(sent, rank, round);
			came.assign(COUNT, -1);
			barrier();
			sender->send(from * size, length * size, to * size);
			receiver->waitRecv();
			sender->waitSend();
			check("message", came.data(), COUNT, [&](size_t at) {
				return at < to || at >= to + length ? -1 : element(left, round, at - to + from);
			});
			barrier();
		}
	}

	/* Until every rank is here and no send is under way, with which Gloo would not let the buffers go; its barriers don't wait
	 * for their own. Completions of a pair come in order. */
	void settle()
	{
		std::vector<std::unique_ptr<gloo::transport::Buffer>> out, in;
		std::vector<int> said(ranks), heard(ranks);
		int slot = peers->nextSlot();

		for (int of = 0; of < ranks; of++)
			if (of != rank) {
				out.push_back(peers->getPair(of)->createSendBuffer(slot, &said[of], sizeof(int)));
				in.push_back(peers->getPair(of)->createRecvBuffer(slot, &heard[of], sizeof(int)));
				out.back()->send();
			}
		for (auto &buffer : in)
			buffer->waitRecv();
		for (auto &buffer : out)
			buffer->waitSend();
	}

	void all()
	{
		make<gloo::BarrierAllToOne>().run();
		barrier();
		broadcast();
		allreduce<gloo::AllreduceRing<int32_t>>("allreduce, ring");
		allreduce<gloo::AllreduceRingChunked<int32_t>>("allreduce, chunks in a ring");
		allreduce<gloo::AllreduceHalvingDoubling<int32_t>>("allreduce, halving and doubling");
		allreduce<gloo::AllreduceBcube<int32_t>>("allreduce, bcube");
		allgather();
		reduce_scatter();
		messages();
		settle();
	}
};

/* Not over the pairs. */
static void meet(gloo::rendezvous::Store &store, const std::string &where, int rank, int ranks)
{
	std::vector<std::string> all;

	store.set(where + std::to_string(rank), {});
	for (int of = 0; of < ranks; of++)
		all.push_back(where + std::to_string(of));
	store.wait(all, PATIENCE);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	const int rank = atoi(argv[1]), ranks = atoi(argv[2]);
	gloo::rendezvous::FileStore files(argv[3]);
	gloo::transport::ibverbs::attr attr;
	/* Never let go: the device's thread may still be in a pair whose event it took when the pair is destroyed. */
	auto kept = new std::vector<std::shared_ptr<gloo::rendezvous::Context>>;

	attr.name = "ferroce0";
	attr.port = 1;
	attr.index = 0;
	std::shared_ptr<gloo::transport::Device> device = gloo::transport::ibverbs::CreateDevice(attr);
	for (std::string waits : {"sleeping", "polling"}) {
		gloo::rendezvous::PrefixStore store(waits, files);
		auto peers = std::make_shared<gloo::rendezvous::Context>(rank, ranks);

		kept->push_back(peers);
		peers->setTimeout(PATIENCE);
		peers->connectFullMesh(store, device);
		for (int of = 0; waits == "polling" && of < ranks; of++)
			if (of != rank)
				peers->getPair(of)->setSync(true, true);
		/* A pair that begins to poll takes no lock: the device's thread must have nothing to do for it any more. */
		meet(store, "connected", rank, ranks);
		Suite(peers).all();
		meet(store, "compared", rank, ranks);
	}
	if (!rank)
		puts("all compared");
	fflush(stdout);
	_exit(0);
}
