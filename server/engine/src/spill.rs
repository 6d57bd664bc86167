//! Stores evicted blocks in a directory and restores them for later requests, even after a restart.
//!
//! Once the directory is open, the engine's thread decides which blocks are written, read and removed, and copies them
//! between the cache and memory. Two other threads access the disk, so that no step waits for it. If the disk is slow
//! or fails, requests only take longer, because they wait for a limited time and then compute the blocks.
//!
//! ```text
//! cache ─ copy ─► queue of WRITES_MAX ─► writer ─► file       if the queue is full, the block is dropped
//! cache ◄─ copy ─ READ_AHEAD_MAX blocks ◄─ reader ◄─ file     if a block is overdue, the request computes it
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use server_scheduler::{BlockKey, EvictedBlock, RestoreId, RestoreTarget, Scheduler};

use crate::runner::ModelRunner;
use crate::waker::Waker;
use disk::{ReadBlock, ReadRequest, ResultSender, WriteBlock, WriteRequest, WriteResult};
use index::StoredBlocks;

pub(crate) use config::key_scheme;
pub use config::{SpillConfig, SpillIdentity};
pub use stats::SpillStats;

mod config;
mod disk;
mod index;
mod stats;

/// Number of evicted blocks that wait to be written to `--kv-spill-dir`.
///
/// If exceeded: further evicted blocks are dropped.
const WRITES_MAX: usize = 64;
/// Number of requests that wait for blocks to be read from `--kv-spill-dir`.
///
/// If exceeded: further requests compute their blocks instead.
const READS_MAX: usize = 256;
/// Maximum number of blocks that have been read, but not yet received by the engine.
const READ_AHEAD_MAX: usize = 16;
/// Maximum number of blocks that are copied into the cache between two steps.
const RESTORED_MAX: usize = 16;
/// The minimum time that a request waits for its blocks before it computes them. A request waits longer if computing
/// the blocks is expected to take longer.
const WAIT_MIN: Duration = Duration::from_millis(200);
/// The assumed number of prompt tokens computed per second before this rate is measured.
const INITIAL_RATE: f32 = 500.0;
/// Time that a request waits for the next block from `--kv-spill-dir`, unless computing its blocks is expected to take
/// less time.
///
/// If exceeded: the request computes the remaining blocks; if the disk delivers no blocks for any request, no blocks
/// are read for the next 10 s.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// The time for which restores are paused after the disk has proved too slow.
const PAUSE: Duration = Duration::from_secs(10);
/// Time to write the cached blocks to `--kv-spill-dir` before the server sleeps or exits. Before it exits, the same
/// time is available again for the blocks that are still queued.
///
/// If exceeded: the remaining blocks are lost.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// A restore in progress.
struct ActiveRestore {
    id: RestoreId,
    /// The time at which the next block is overdue.
    deadline: Duration,
    /// The latest possible deadline of any block.
    last_deadline: Duration,
    /// Whether the restore was requested from the reader.
    is_requested: bool,
    /// A flag by which the reader checks whether the blocks are still needed.
    is_needed: Arc<AtomicBool>,
}

/// The state of spilling on the engine's thread.
pub(crate) struct Spill {
    /// `None` while `self` is being dropped.
    writes: Option<SyncSender<WriteRequest>>,
    write_results: Receiver<WriteResult>,
    reads: SyncSender<ReadRequest>,
    read_blocks: Receiver<ReadBlock>,
    waker: Waker,
    stats: Arc<SpillStats>,
    stored: StoredBlocks,
    /// Number of writes whose results have not been received.
    queued: usize,
    /// The blocks to remove with the next write.
    removed: Vec<BlockKey>,
    restores: Vec<ActiveRestore>,
    /// Whether the latest poll has received a block from the reader.
    has_read: bool,
    /// The time until which no restores are requested.
    pause_until: Duration,
    block_bytes: usize,
    block_tokens: u32,
    /// The files of the model and of the runtime, with the sizes and modification times by which changes are detected.
    files: Vec<(PathBuf, FileStamp)>,
}

/// The size and the modification time of a file, if they are available.
type FileStamp = Option<(u64, SystemTime)>;

impl Spill {
    /// Starts the threads, which wake the engine with `waker`.
    ///
    /// # Errors
    /// The error of the operating system if a thread could not be started.
    pub(crate) fn start(
        config: &SpillConfig,
        runner: &dyn ModelRunner,
        waker: Waker,
        stats: Arc<SpillStats>,
    ) -> std::io::Result<Self> {
        let layout = runner.layout();
        // The channel has room for the results of all queued writes and for `Opened`, so that the writer never waits
        // for the engine.
        let (write_sender, write_results) = sync_channel(WRITES_MAX + 1);
        let (read_sender, read_blocks) = sync_channel(READ_AHEAD_MAX);
        let (writes, write_requests) = sync_channel(WRITES_MAX);
        let (reads, read_requests) = sync_channel(READS_MAX);
        let write_sender = ResultSender { results: write_sender, waker: waker.clone() };
        let read_sender = ResultSender { results: read_sender, waker: waker.clone() };
        let (writer, reader) = disk::workers(config, layout, write_sender, read_sender);
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(run)
        };
        // The threads are not joined, so that a hanging disk does not delay the shutdown.
        spawn("spill-write", Box::new(move || writer.run(&write_requests)))?;
        spawn("spill-read", Box::new(move || reader.run(&read_requests)))?;
        Ok(Self {
            writes: Some(writes),
            write_results,
            reads,
            read_blocks,
            waker,
            stats,
            stored: StoredBlocks::new(config.bytes_max),
            queued: 0,
            removed: Vec::new(),
            restores: Vec::new(),
            has_read: false,
            pause_until: Duration::ZERO,
            block_bytes: layout.block_bytes as usize,
            block_tokens: layout.block_tokens,
            files: config.identity.files.iter().map(|file| (file.clone(), stamp(file))).collect(),
        })
    }

    /// Whether a file of the model or of the runtime has changed since the start, so that another model may be loaded.
    pub(crate) fn has_model_changed(&self) -> bool {
        self.files.iter().any(|(file, before)| stamp(file) != *before)
    }

    /// Copies the blocks that the scheduler has evicted, before they are overwritten.
    pub(crate) fn save_evicted(&mut self, scheduler: &mut Scheduler, runner: &dyn ModelRunner) {
        for evicted in scheduler.drain_evicted() {
            self.save_block(scheduler, runner, evicted);
        }
        self.publish_stats();
    }

    /// Evicts all cached blocks that no sequence holds, and stores as many of them as possible within [`FLUSH_MAX`].
    pub(crate) fn flush(&mut self, scheduler: &mut Scheduler, runner: &dyn ModelRunner) {
        let until = Instant::now() + FLUSH_MAX;
        scheduler.clear_cache();
        for evicted in scheduler.drain_evicted() {
            while self.queued >= WRITES_MAX {
                let remaining = until.saturating_duration_since(Instant::now());
                let Ok(result) = self.write_results.recv_timeout(remaining) else { break };
                self.apply_write_result(scheduler, result);
            }
            self.save_block(scheduler, runner, evicted);
        }
        self.publish_stats();
    }

    fn save_block(
        &mut self,
        scheduler: &mut Scheduler,
        runner: &dyn ModelRunner,
        EvictedBlock { block, key }: EvictedBlock,
    ) {
        if self.stored.touch(key) {
            return;
        }
        let bytes = disk::HEADER_BYTES + self.block_bytes as u64;
        let has_room = self.stats.is_open() && self.queued < WRITES_MAX && bytes <= self.stored.bytes_max();
        let mut content = vec![0; if has_room { self.block_bytes } else { 0 }];
        if !has_room || runner.read_block(block, &mut content).is_err() {
            self.stats.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.add(scheduler, key, bytes);
        self.send_write(Some(WriteBlock { key, content }));
    }

    /// Requests the blocks of the restores that the scheduler has begun. `rate` is the number of prompt tokens computed
    /// per second.
    pub(crate) fn start_restores(&mut self, scheduler: &mut Scheduler, now: Duration, rate: f32) {
        for restore in scheduler.drain_restores() {
            // Mark the blocks as used, so that they are not removed before they are read. The reverse order makes later
            // blocks the first candidates for removal.
            for &key in restore.keys.iter().rev() {
                self.stored.touch(key);
            }
            let tokens = (restore.keys.len() as u32 * self.block_tokens) as f32;
            let rate = if rate > 0.0 { rate } else { INITIAL_RATE };
            let compute_time = Duration::try_from_secs_f32(tokens / rate).unwrap_or(WAIT_MAX);
            let is_needed = Arc::new(AtomicBool::new(true));
            let request =
                ReadRequest { restore: restore.id, keys: restore.keys, is_needed: Arc::clone(&is_needed) };
            let is_requested = now >= self.pause_until && self.reads.try_send(request).is_ok();
            // A restore that is not requested is overdue immediately.
            let wait = if is_requested { compute_time.max(WAIT_MIN) } else { Duration::ZERO };
            let last_deadline = now + wait;
            let deadline = last_deadline.min(now + WAIT_MAX);
            let id = restore.id;
            self.restores.push(ActiveRestore { id, deadline, last_deadline, is_requested, is_needed });
        }
    }

    /// Applies the results of the writer, and a limited number of blocks from the reader, so that the next step is not
    /// delayed.
    pub(crate) fn poll(&mut self, scheduler: &mut Scheduler, runner: &mut dyn ModelRunner, now: Duration) {
        while let Ok(result) = self.write_results.try_recv() {
            self.apply_write_result(scheduler, result);
        }
        let mut remaining = RESTORED_MAX;
        while remaining > 0
            && let Ok(block) = self.read_blocks.try_recv()
        {
            remaining -= 1;
            if let Some(restore) = self.restores.iter_mut().find(|restore| restore.id == block.restore) {
                restore.deadline = restore.last_deadline.min(now + WAIT_MAX);
            }
            self.restore_block(scheduler, runner, block);
        }
        self.has_read = remaining < RESTORED_MAX;
        if remaining == 0 {
            // Re-arm: the remaining blocks do not send another wake-up.
            self.waker.wake();
        }
        if !self.removed.is_empty() {
            self.send_write(None);
        }
        self.publish_stats();
    }

    /// Ends the restores whose next block is overdue. If the first restore is among them and the latest [`Self::poll`]
    /// has received no block, also pauses restores, because the disk is too slow.
    pub(crate) fn end_overdue(&mut self, scheduler: &mut Scheduler, now: Duration) {
        while let Some(index) = self.restores.iter().position(|restore| restore.deadline <= now) {
            // The reader processes restores in order, so the other restores may be overdue only because they waited for
            // the first one. If the latest poll received blocks, the reader may have waited for the engine instead of
            // the disk.
            if index == 0 && self.restores[0].is_requested && !self.has_read {
                tracing::warn!(
                    seconds = PAUSE.as_secs(),
                    "reading evicted blocks timed out; restores are paused"
                );
                self.pause_until = now + PAUSE;
                self.restores
                    .iter_mut()
                    .for_each(|other| (other.deadline, other.is_requested) = (now, false));
            }
            self.end_restore(scheduler, self.restores[index].id);
        }
    }

    /// Number of restores in progress.
    pub(crate) fn num_restores(&self) -> usize {
        self.restores.len()
    }

    /// The time at which the next restore is overdue.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.restores.iter().map(|restore| restore.deadline).min()
    }

    fn apply_write_result(&mut self, scheduler: &mut Scheduler, result: WriteResult) {
        match result {
            WriteResult::Opened(files) => {
                for (key, bytes) in files {
                    self.stored.add(key, bytes);
                    scheduler.add_stored(key);
                }
                self.publish_stats();
                self.stats.is_open.store(true, Ordering::Release);
            }
            WriteResult::Written(key) => {
                self.queued -= 1;
                self.stats.written.fetch_add(1, Ordering::Relaxed);
                if self.stored.contains(key) {
                    scheduler.add_stored(key);
                } else {
                    self.removed.push(key);
                }
            }
            WriteResult::Failed(key) => {
                self.queued -= 1;
                self.stats.dropped.fetch_add(1, Ordering::Relaxed);
                self.stored.remove(key);
                scheduler.remove_stored(key);
            }
        }
    }

    /// Writes a block from the reader into the cache. Ends the restore of a block that could not be read or written.
    fn restore_block(&mut self, scheduler: &mut Scheduler, runner: &mut dyn ModelRunner, block: ReadBlock) {
        let ReadBlock { restore, key, content } = block;
        let Some(content) = content else {
            if self.stored.contains(key) {
                self.stats.unreadable.fetch_add(1, Ordering::Relaxed);
            }
            self.stored.remove(key);
            self.removed.push(key);
            scheduler.remove_stored(key);
            self.end_restore(scheduler, restore);
            return;
        };
        let target = scheduler.begin_block_restore(restore);
        self.save_evicted(scheduler, runner);
        if let RestoreTarget::Write(block) = target {
            if runner.write_block(block, &content).is_ok() {
                scheduler.finish_block_restore(restore);
                self.stats.restored.fetch_add(1, Ordering::Relaxed);
            } else {
                scheduler.end_restore(restore);
            }
        }
        if !scheduler.is_restore_active(restore) {
            self.end_restore(scheduler, restore);
        }
    }

    /// Ends a restore, so that no further blocks are read for it.
    fn end_restore(&mut self, scheduler: &mut Scheduler, id: RestoreId) {
        scheduler.end_restore(id);
        self.restores.retain(|active| {
            let is_other = active.id != id;
            active.is_needed.fetch_and(is_other, Ordering::AcqRel);
            is_other
        });
    }

    /// Adds a block to the stored ones, and removes the least recently used blocks beyond the size limit.
    fn add(&mut self, scheduler: &mut Scheduler, key: BlockKey, bytes: u64) {
        self.stored.add(key, bytes);
        while let Some(removed) = self.stored.pop_excess() {
            scheduler.remove_stored(removed);
            self.removed.push(removed);
        }
    }

    fn send_write(&mut self, block: Option<WriteBlock>) {
        let Some(writes) = &self.writes else { return };
        let has_block = block.is_some();
        let write = WriteRequest { remove: std::mem::take(&mut self.removed), block };
        match writes.try_send(write) {
            Ok(()) => self.queued += usize::from(has_block),
            Err(TrySendError::Full(write) | TrySendError::Disconnected(write)) => {
                self.removed = write.remove;
                if let Some(WriteBlock { key, .. }) = write.block {
                    self.stored.remove(key);
                    self.stats.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn publish_stats(&self) {
        self.stats.queued.store(self.queued as u64, Ordering::Release);
        self.stats.blocks.store(self.stored.len() as u64, Ordering::Relaxed);
        self.stats.bytes.store(self.stored.bytes(), Ordering::Relaxed);
    }
}

impl Drop for Spill {
    /// Waits until the queued blocks are written and the directory is unlocked, but no longer than [`FLUSH_MAX`].
    fn drop(&mut self) {
        self.restores.iter().for_each(|restore| restore.is_needed.store(false, Ordering::Release));
        self.writes = None;
        let until = Instant::now() + FLUSH_MAX;
        while self.write_results.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
    }
}

fn stamp(file: &std::path::Path) -> FileStamp {
    let metadata = file.metadata().ok()?;
    Some((metadata.len(), metadata.modified().ok()?))
}
