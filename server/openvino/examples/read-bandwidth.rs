//! Measures how fast all threads together read memory, like STREAM but without writes: prints the best of several
//! rounds in bytes per second. Generating a token reads the weights once, so this bandwidth limits the speed of
//! decoding.

use std::hint::black_box;
use std::num::NonZero;
use std::sync::Barrier;
use std::time::Instant;

/// The memory that each thread reads is far larger than the caches of a processor.
const BYTES_PER_THREAD: usize = 512 << 20;
const ROUNDS: usize = 8;

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(threads);
    let barrier = Barrier::new(threads);
    let seconds: Vec<[f64; ROUNDS]> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(|| read(&barrier))).collect();
        readers.into_iter().map(|reader| reader.join().expect("a reader does not panic")).collect()
    });
    // A round ends when the last thread has read its memory.
    let round = |round: usize| seconds.iter().map(|of_thread| of_thread[round]).fold(0.0, f64::max);
    let best = (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min);
    #[expect(clippy::print_stdout, reason = "the result of this program")]
    {
        println!("{:.0}", (threads * BYTES_PER_THREAD) as f64 / best);
    }
}

/// The time in seconds that one thread needs to read its memory, for each round.
fn read(barrier: &Barrier) -> [f64; ROUNDS] {
    // The thread that reads the memory also writes it first, so that the system allocates it on the thread's NUMA node.
    let memory: Vec<u64> = (0..BYTES_PER_THREAD as u64 / 8).collect();
    std::array::from_fn(|_| {
        barrier.wait();
        let started = Instant::now();
        // With a single sum, each addition would wait for the one before it.
        let mut sums = [0u64; 32];
        for words in memory.as_chunks::<32>().0 {
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum = sum.wrapping_add(*word);
            }
        }
        black_box(sums);
        started.elapsed().as_secs_f64()
    })
}
