//! Blocks that the cache gave up, kept in a directory until a later request wants them back; after a restart too.
//!
//! The engine's thread decides what is written, read and removed, and copies bytes between the cache and memory. Two
//! threads do all that touches the disk, so that no step waits for it. Whatever goes wrong there costs what the prefix
//! cache would have saved, and nothing else.
//!
//! ```text
//! cache ─ copy ─► queue of WRITES_MAX ─► writer ─► file       full: the block is dropped
//! cache ◄─ copy ─ READ_AHEAD_MAX blocks ◄─ reader ◄─ file     late: the request computes
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use server_scheduler::{BlockId, BlockKey, BlockKeyScheme, RestoreId, RestoreTarget, Scheduler, TokenId};
use sha2::{Digest as _, Sha256};

use crate::runner::ModelRunner;
use crate::waker::Waker;
use kept::Kept;

pub use stats::SpillStats;

mod disk;
mod kept;
mod stats;

/// Number of evicted blocks that wait to be written to `--kv-spill-dir`.
///
/// Beyond it: further evicted blocks are dropped.
const WRITES_MAX: usize = 64;
/// Number of requests that wait for blocks to be read from `--kv-spill-dir`.
///
/// Beyond it: further requests compute their blocks instead.
const READS_MAX: usize = 256;
/// Blocks that are read ahead of the engine.
const READ_AHEAD_MAX: usize = 16;
/// Blocks that are copied into the cache before a step.
const PLACED_MAX: usize = 16;
/// The shortest time that a request waits for its blocks. It waits longer if computing the blocks would take longer.
const PATIENCE_MIN: Duration = Duration::from_millis(200);
/// Prompt tokens computed a second, as long as that is not known.
const RATE_UNKNOWN: f32 = 500.0;
/// Time that a request waits for the next block from `--kv-spill-dir`, if computing its blocks would take that long.
///
/// Beyond it: the request computes the remaining blocks, and no blocks are read for 10 s.
const PATIENCE_MAX: Duration = Duration::from_secs(10);
/// After blocks did not come in time, nothing is asked for so long: others need not find out as well.
const PAUSE: Duration = Duration::from_secs(10);
/// Time to write the cached blocks to `--kv-spill-dir` before the server sleeps, and those that are queued when it
/// ends.
///
/// Beyond it: the remaining blocks are lost.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// Where evicted blocks are kept.
#[derive(Clone, Debug)]
pub struct SpillConfig {
    /// The directory. It belongs to one server at a time: another waits, and does without, until it ends.
    pub folder: PathBuf,
    /// Most bytes of all files.
    pub bytes_max: u64,
    /// What the bytes of a block depend on, besides its tokens. What was kept of anything else is removed.
    pub identity: SpillIdentity,
}

/// What the bytes of a block depend on.
#[derive(Clone, Debug)]
pub struct SpillIdentity {
    /// How they are computed and laid out.
    pub description: String,
    /// The files of the model and of what computes it, by their content.
    pub files: Vec<PathBuf>,
    /// Of each adapter a number that changes with its content. What was kept of others stays, and is not found.
    pub adapters: Vec<u64>,
}

/// How blocks are named: by SHA-256 of the key before and the tokens. So nobody can make a block that is taken for
/// another's, as could be done with the hash that the prefix cache looks up by.
pub(crate) fn keying(identity: &SpillIdentity) -> BlockKeyScheme {
    let none = BlockKey([0; 32]);
    let adapter = |digest: &u64| block_key(none, &[*digest as u32, (*digest >> 32) as u32, 1]);
    BlockKeyScheme {
        block_key,
        adapters: std::iter::once(none).chain(identity.adapters.iter().map(adapter)).collect(),
    }
}

fn block_key(before: BlockKey, tokens: &[TokenId]) -> BlockKey {
    let mut hash = Sha256::new();
    hash.update(before.0);
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    BlockKey(hash.finalize().into())
}

/// For the writer: first what is removed.
struct Write {
    remove: Vec<BlockKey>,
    keep: Option<(BlockKey, Vec<u8>)>,
}

/// What the writer tells.
enum Written {
    /// What was there at the start, oldest first: keys and bytes of the files. Nothing is written before.
    Found(Vec<(BlockKey, u64)>),
    Kept(BlockKey),
    Lost(BlockKey),
}

/// For the reader.
struct Read {
    reading: RestoreId,
    keys: Vec<BlockKey>,
    wanted: Arc<AtomicBool>,
}

/// What the reader tells: the next block of a reading. Without one there are no more.
struct Block {
    reading: RestoreId,
    key: BlockKey,
    bytes: Option<Vec<u8>>,
}

/// A thread's way to the engine.
struct Teller<T> {
    told: SyncSender<T>,
    waker: Waker,
}

impl<T> Teller<T> {
    /// False if the engine has ended.
    fn tell(&self, news: T) -> bool {
        let is_told = self.told.send(news).is_ok();
        self.waker.wake();
        is_told
    }
}

/// A reading that is under way.
struct Reading {
    id: RestoreId,
    /// When the request stops waiting for the next block.
    until: Duration,
    /// When it stops waiting at all.
    end: Duration,
    is_asked: bool,
    wanted: Arc<AtomicBool>,
}

/// What the engine's thread has of it.
pub(crate) struct Spill {
    /// None once it ends.
    writes: Option<SyncSender<Write>>,
    written: Receiver<Written>,
    reads: SyncSender<Read>,
    blocks: Receiver<Block>,
    waker: Waker,
    stats: Arc<SpillStats>,
    kept: Kept,
    /// Writes that were not told of yet.
    queued: usize,
    /// What is to be removed with the next write.
    removed: Vec<BlockKey>,
    readings: Vec<Reading>,
    /// When something is asked for again.
    pause_until: Duration,
    block_bytes: usize,
    block_tokens: u32,
    /// The files of the model, and what tells whether they have changed.
    files: Vec<(PathBuf, Stamp)>,
}

/// Length and time of the last change, if they are to be had.
type Stamp = Option<(u64, SystemTime)>;

impl Spill {
    /// Starts the threads, which wake the engine by `waker`.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(crate) fn start(
        config: &SpillConfig,
        runner: &dyn ModelRunner,
        waker: Waker,
        stats: Arc<SpillStats>,
    ) -> std::io::Result<Self> {
        let layout = runner.layout();
        // The writer never waits for the engine.
        let (to_tell, written) = sync_channel(WRITES_MAX + 1);
        let (to_give, blocks) = sync_channel(READ_AHEAD_MAX);
        let (writes, to_write) = sync_channel(WRITES_MAX);
        let (reads, to_read) = sync_channel(READS_MAX);
        let writer = Teller { told: to_tell, waker: waker.clone() };
        let reader = Teller { told: to_give, waker: waker.clone() };
        let (writer, reader) = disk::workers(config, layout, (writer, reader));
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(run)
        };
        // Neither is joined: one that hangs with its disk holds up nobody.
        spawn("spill-write", Box::new(move || writer.run(&to_write)))?;
        spawn("spill-read", Box::new(move || reader.run(&to_read)))?;
        Ok(Self {
            writes: Some(writes),
            written,
            reads,
            blocks,
            waker,
            stats,
            kept: Kept::new(config.bytes_max),
            queued: 0,
            removed: Vec::new(),
            readings: Vec::new(),
            pause_until: Duration::ZERO,
            block_bytes: layout.block_bytes as usize,
            block_tokens: layout.block_tokens,
            files: config.identity.files.iter().map(|file| (file.clone(), stamp(file))).collect(),
        })
    }

    /// Whether the model's files are not those any more that they were at the start, so that what is loaded anew may be
    /// another model.
    pub(crate) fn is_of_another_model(&self) -> bool {
        self.files.iter().any(|(file, before)| stamp(file) != *before)
    }

    /// Copies what the scheduler has just evicted, before anything is written over it.
    pub(crate) fn save(&mut self, scheduler: &mut Scheduler, runner: &dyn ModelRunner) {
        for evicted in scheduler.drain_evicted() {
            self.save_block(scheduler, runner, (evicted.block, evicted.key));
        }
        self.tell_stats();
    }

    /// Gives up all that is cached and that nobody holds, and keeps it, as far as that is done in [`FLUSH_MAX`].
    pub(crate) fn flush(&mut self, scheduler: &mut Scheduler, runner: &dyn ModelRunner) {
        let until = Instant::now() + FLUSH_MAX;
        scheduler.clear_cache();
        for evicted in scheduler.drain_evicted() {
            while self.queued >= WRITES_MAX {
                let left = until.saturating_duration_since(Instant::now());
                let Ok(written) = self.written.recv_timeout(left) else { break };
                self.take_written(scheduler, written);
            }
            self.save_block(scheduler, runner, (evicted.block, evicted.key));
        }
        self.tell_stats();
    }

    fn save_block(
        &mut self,
        scheduler: &mut Scheduler,
        runner: &dyn ModelRunner,
        (block, key): (BlockId, BlockKey),
    ) {
        if self.kept.touch(key) {
            return;
        }
        let bytes = disk::HEADER_BYTES + self.block_bytes as u64;
        let has_room = self.stats.is_open() && self.queued < WRITES_MAX && bytes <= self.kept.bytes_max();
        let mut content = vec![0; if has_room { self.block_bytes } else { 0 }];
        if !has_room || runner.read_block(block, &mut content).is_err() {
            self.stats.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.add(scheduler, key, bytes);
        self.send(Some((key, content)));
    }

    /// Asks for what the scheduler wants back. `rate`: prompt tokens computed a second.
    pub(crate) fn ask(&mut self, scheduler: &mut Scheduler, now: Duration, rate: f32) {
        for read in scheduler.drain_restores() {
            // What is about to be read does not go before it is, and what follows goes first.
            for &key in read.keys.iter().rev() {
                self.kept.touch(key);
            }
            let tokens = (read.keys.len() as u32 * self.block_tokens) as f32;
            let rate = if rate > 0.0 { rate } else { RATE_UNKNOWN };
            let computing = Duration::try_from_secs_f32(tokens / rate).unwrap_or(PATIENCE_MAX);
            let wanted = Arc::new(AtomicBool::new(true));
            let asked = Read { reading: read.id, keys: read.keys, wanted: Arc::clone(&wanted) };
            let is_asked = now >= self.pause_until && self.reads.try_send(asked).is_ok();
            // What is not asked for is late at once.
            let end = now + if is_asked { computing.max(PATIENCE_MIN) } else { Duration::ZERO };
            let until = end.min(now + PATIENCE_MAX);
            self.readings.push(Reading { id: read.id, until, end, is_asked, wanted });
        }
    }

    /// Takes in what the threads have to tell, no more than may hold up a step.
    pub(crate) fn poll(&mut self, scheduler: &mut Scheduler, runner: &mut dyn ModelRunner, now: Duration) {
        while let Ok(written) = self.written.try_recv() {
            self.take_written(scheduler, written);
        }
        let mut left = PLACED_MAX;
        while left > 0
            && let Ok(block) = self.blocks.try_recv()
        {
            left -= 1;
            if let Some(reading) = self.readings.iter_mut().find(|reading| reading.id == block.reading) {
                reading.until = reading.end.min(now + PATIENCE_MAX);
            }
            self.place(scheduler, runner, block);
        }
        if left == 0 {
            // Of the others nobody tells again.
            self.waker.wake();
        }
        if !self.removed.is_empty() {
            self.send(None);
        }
        self.tell_stats();
    }

    /// Stops waiting for what is late.
    pub(crate) fn expire(&mut self, scheduler: &mut Scheduler, now: Duration) {
        while let Some(at) = self.readings.iter().position(|reading| reading.until <= now) {
            // Any other may only have waited for those before it.
            if at == 0 && self.readings[0].is_asked {
                tracing::warn!(
                    seconds = PAUSE.as_secs(),
                    "blocks are not read in time: none are for a while"
                );
                self.pause_until = now + PAUSE;
                self.readings.iter_mut().for_each(|other| (other.until, other.is_asked) = (now, false));
            }
            self.end(scheduler, self.readings[at].id);
        }
    }

    /// Readings that are not over.
    pub(crate) fn under_way(&self) -> usize {
        self.readings.len()
    }

    /// When something is late next.
    pub(crate) fn next_late(&self) -> Option<Duration> {
        self.readings.iter().map(|reading| reading.until).min()
    }

    fn take_written(&mut self, scheduler: &mut Scheduler, written: Written) {
        match written {
            Written::Found(files) => {
                for (key, bytes) in files {
                    self.kept.add(key, bytes);
                    scheduler.add_stored(key);
                }
                self.tell_stats();
                self.stats.is_open.store(true, Ordering::Release);
            }
            Written::Kept(key) => {
                self.queued -= 1;
                self.stats.written.fetch_add(1, Ordering::Relaxed);
                match self.kept.has(key) {
                    true => scheduler.add_stored(key),
                    false => self.removed.push(key),
                }
            }
            Written::Lost(key) => {
                self.queued -= 1;
                self.stats.dropped.fetch_add(1, Ordering::Relaxed);
                self.kept.remove(key);
                scheduler.remove_stored(key);
            }
        }
    }

    /// A block has been read, or could not be.
    fn place(&mut self, scheduler: &mut Scheduler, runner: &mut dyn ModelRunner, block: Block) {
        let Block { reading, key, bytes } = block;
        let Some(bytes) = bytes else {
            if self.kept.has(key) {
                self.stats.unreadable.fetch_add(1, Ordering::Relaxed);
            }
            self.kept.remove(key);
            self.removed.push(key);
            scheduler.remove_stored(key);
            self.end(scheduler, reading);
            return;
        };
        let place = scheduler.begin_block_restore(reading);
        self.save(scheduler, runner);
        if let RestoreTarget::Write(block) = place {
            if runner.write_block(block, &bytes).is_ok() {
                scheduler.finish_block_restore(reading);
                self.stats.read_back.fetch_add(1, Ordering::Relaxed);
            } else {
                scheduler.end_restore(reading);
            }
        }
        if !scheduler.is_restore_active(reading) {
            self.end(scheduler, reading);
        }
    }

    /// Nothing more is read for it.
    fn end(&mut self, scheduler: &mut Scheduler, reading: RestoreId) {
        scheduler.end_restore(reading);
        self.readings.retain(|under_way| {
            let is_other = under_way.id != reading;
            under_way.wanted.fetch_and(is_other, Ordering::AcqRel);
            is_other
        });
    }

    /// One more is kept, or will be; what is too much goes.
    fn add(&mut self, scheduler: &mut Scheduler, key: BlockKey, bytes: u64) {
        self.kept.add(key, bytes);
        while let Some(old) = self.kept.pop_excess() {
            scheduler.remove_stored(old);
            self.removed.push(old);
        }
    }

    fn send(&mut self, keep: Option<(BlockKey, Vec<u8>)>) {
        let Some(writes) = &self.writes else { return };
        let is_block = keep.is_some();
        let write = Write { remove: std::mem::take(&mut self.removed), keep };
        match writes.try_send(write) {
            Ok(()) => self.queued += usize::from(is_block),
            Err(TrySendError::Full(write) | TrySendError::Disconnected(write)) => {
                self.removed = write.remove;
                if let Some((key, _)) = write.keep {
                    self.kept.remove(key);
                    self.stats.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn tell_stats(&self) {
        self.stats.queued.store(self.queued as u64, Ordering::Release);
        self.stats.blocks.store(self.kept.len() as u64, Ordering::Relaxed);
        self.stats.bytes.store(self.kept.bytes(), Ordering::Relaxed);
    }
}

impl Drop for Spill {
    /// What is queued is still written, and the directory is free then, unless that takes longer than [`FLUSH_MAX`].
    fn drop(&mut self) {
        self.readings.iter().for_each(|reading| reading.wanted.store(false, Ordering::Release));
        self.writes = None;
        let until = Instant::now() + FLUSH_MAX;
        while self.written.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
    }
}

fn stamp(file: &std::path::Path) -> Stamp {
    let metadata = file.metadata().ok()?;
    Some((metadata.len(), metadata.modified().ok()?))
}
