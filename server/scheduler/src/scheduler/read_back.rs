//! Evicted blocks that are kept elsewhere: which come back, for whom, and where to.

use super::Scheduler;
use crate::TokenId;
use crate::block::BlockId;
use crate::block_pool::{After, BlockPool, Registered, Serial};
use crate::keys::{BlockKey, Evicted, Keying, Keys};
use crate::readings::{Place, ReadBack, Reading, ReadingId, Readings};
use crate::sequence::{Sequence, Wish};

impl Scheduler {
    /// From now on tells what is evicted, under keys that are made as `keying` says. They have to be as good as the
    /// content: what is read back is not compared.
    ///
    /// # Panics
    /// If there was a request already, or nothing is cached at all.
    pub fn tell_evicted(&mut self, keying: Keying) {
        assert!(self.arrivals == 0 && self.config.prefix_caching, "blocks have keys from the first on");
        self.pool.set_keys(Some(Keys::new(keying, self.config.blocks_total)));
        self.readings = Some(Box::default());
    }

    /// Tells nothing any more, and has nothing read back.
    pub fn forget_stored(&mut self) {
        while self.end_youngest_reading() {}
        self.pool.set_keys(None);
        self.readings = None;
    }

    /// What was evicted since the last call: to be copied before the batch is computed, or the block written that
    /// [`Self::place`] gave.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        self.pool.keys_mut().map(Keys::take_evicted).unwrap_or_default()
    }

    /// What waiting requests want back, since the last call.
    pub fn take_reads(&mut self) -> Vec<ReadBack> {
        self.readings.as_mut().map(|readings| std::mem::take(&mut readings.asked)).unwrap_or_default()
    }

    /// The block of this key can be read back.
    pub fn stored(&mut self, key: BlockKey) {
        if let Some(readings) = &mut self.readings {
            readings.stored.insert(key);
        }
    }

    /// It cannot any more.
    pub fn unstored(&mut self, key: BlockKey) {
        if let Some(readings) = &mut self.readings {
            readings.stored.remove(&key);
        }
    }

    /// Whether requests wait for blocks that are read back. Then there may be batches without rows.
    pub fn is_reading(&self) -> bool {
        self.readings.as_ref().is_some_and(|readings| !readings.under_way.is_empty())
    }

    /// Whether a reading is under way.
    pub fn wants(&self, id: ReadingId) -> bool {
        self.readings.as_ref().is_some_and(|readings| readings.position(id).is_some())
    }

    /// Where the next block of a reading goes, which has come.
    ///
    /// # Panics
    /// If a batch is in flight, or the block before was not told of by [`Self::placed`].
    pub fn place(&mut self, id: ReadingId) -> Place {
        assert!(self.in_flight.is_empty(), "blocks come between the steps");
        let Self { readings: Some(readings), sequences, pool, config, .. } = self else {
            return Place::Unwanted;
        };
        let Some(at) = readings.position(id) else { return Place::Unwanted };
        let reading = &mut readings.under_way[at];
        assert!(reading.written.is_none(), "one block after the other");
        let sequence = sequences.get(reading.slot);
        let last = last_serial(pool, sequence, &reading.table);
        if let Some(block) = pool.find(sequence.content(reading.table.len(), config.block_tokens, last)) {
            pool.share(block);
            reading.table.push(block);
            self.end_if_complete(id);
            return Place::Present;
        }
        let Some(block) = pool.allocate() else {
            self.end_reading(id);
            return Place::Unwanted;
        };
        reading.written = Some(block);
        Place::Write(block)
    }

    /// The block that [`Self::place`] gave is written.
    ///
    /// # Panics
    /// If there is none.
    pub fn placed(&mut self, id: ReadingId) {
        let Self { readings, sequences, pool, config, .. } = self;
        let readings = readings.as_mut().expect("there is a reading");
        let at = readings.position(id).expect("there is a reading");
        let reading = &mut readings.under_way[at];
        let block = reading.written.take().expect("there is a block to write");
        let sequence = sequences.get(reading.slot);
        let last = last_serial(pool, sequence, &reading.table);
        let content = sequence.content(reading.table.len(), config.block_tokens, last);
        let after = reading.table.last().map_or(sequence.origin(), |&last| After::Block(last));
        match pool.register(block, after, content) {
            Registered::New => reading.table.push(block),
            // It was not there when the block was given, and nothing was computed since: another has its hash.
            Registered::Duplicate(_) | Registered::Collision => {
                pool.release(block);
                self.end_reading(id);
                return;
            }
        }
        self.end_if_complete(id);
    }

    /// Nothing more comes: the request computes what is left. Nothing happens if the reading has ended.
    pub fn end_reading(&mut self, id: ReadingId) {
        let Some(readings) = &mut self.readings else { return };
        let Some(at) = readings.position(id) else { return };
        let Reading { slot, table, written, .. } = readings.under_way.remove(at);
        self.sequences.get_mut(slot).wish = Wish::Over;
        for block in table.into_iter().chain(written).rev() {
            self.pool.release(block);
        }
    }

    /// Ends the reading of a sequence that goes.
    pub(super) fn end_reading_of(&mut self, slot: u32) {
        let under_way = self.readings.as_ref().map_or(&[][..], |readings| &readings.under_way);
        if let Some(id) = under_way.iter().find(|reading| reading.slot == slot).map(|reading| reading.id) {
            self.end_reading(id);
        }
    }

    /// Ends one reading: somebody needs the room. False if there is none.
    pub(super) fn end_youngest_reading(&mut self) -> bool {
        let last = self.readings.as_ref().and_then(|readings| readings.under_way.last());
        let Some(id) = last.map(|reading| reading.id) else { return false };
        self.end_reading(id);
        true
    }

    /// Whether a waiting sequence, for which there is room, has to wait for a reading: one that begins with this, or
    /// another's.
    pub(super) fn begin_reading(&mut self, slot: u32) -> bool {
        let Self { readings: Some(readings), sequences, pool, config, .. } = self else { return false };
        let sequence = sequences.get(slot);
        if sequence.wish != Wish::Open {
            return false;
        }
        let block_tokens = config.block_tokens;
        let most = ((sequence.cacheable() / block_tokens) as usize).min(sequence.hashes.len());
        let mut table = Vec::new();
        while table.len() < most {
            let content = sequence.content(table.len(), block_tokens, last_serial(pool, sequence, &table));
            let Some(block) = pool.find(content) else { break };
            table.push(block);
        }
        let first = table.len();
        let last = table.last().map_or(sequence.origin(), |&last| After::Block(last));
        let blocks = sequence.tokens.chunks_exact(block_tokens as usize).take(most).skip(first);
        let keys = stored(readings, pool.keys(), (last, blocks));
        if keys.is_empty() {
            return false;
        }
        // Somebody else waits for the same already.
        let is_coming = |reading: &Reading| {
            first < reading.end && sequences.get(reading.slot).hashes.get(first) == sequence.hashes.get(first)
        };
        if readings.under_way.iter().any(is_coming) {
            return true;
        }
        table.iter().for_each(|&block| pool.share(block));
        let id = ReadingId(readings.count);
        readings.count += 1;
        readings.under_way.push(Reading { id, slot, table, end: first + keys.len(), written: None });
        readings.asked.push(ReadBack { id, keys });
        sequences.get_mut(slot).wish = Wish::Granted;
        true
    }

    fn end_if_complete(&mut self, id: ReadingId) {
        let readings = self.readings.as_ref().expect("invariant: it is under way");
        let reading = &readings.under_way[readings.position(id).expect("invariant: it is under way")];
        if reading.table.len() == reading.end {
            self.end_reading(id);
        }
    }
}

/// The keys of the `blocks` after another, as far as they are stored.
fn stored<'a>(
    readings: &Readings,
    keys: Option<&Keys>,
    (last, blocks): (After, impl Iterator<Item = &'a [TokenId]>),
) -> Vec<BlockKey> {
    let Some(keys) = keys.filter(|_| !readings.stored.is_empty()) else { return Vec::new() };
    let mut before = keys.before(last);
    let next = |tokens| {
        before = keys.next(before, tokens);
        readings.stored.contains(&before).then_some(before)
    };
    blocks.map_while(next).collect()
}

/// What the next block of `table` follows.
fn last_serial(pool: &BlockPool, sequence: &Sequence, table: &[BlockId]) -> Serial {
    match table.last() {
        Some(&last) => pool.serial(last).expect("invariant: what a reading holds is cached"),
        None => Serial::root(sequence.adapter),
    }
}
