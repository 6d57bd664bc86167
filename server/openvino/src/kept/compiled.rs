//! Compiled models, kept for the next start, which then need not read, rewrite and compile. As with graphs, whatever is
//! wrong with one costs time, never the start.
//!
//! A file is what the plugin writes, then the hash of that and of the file's name, and [`Facts`]: so nobody reads half of one,
//! what a disk has spoilt, or the model of another name. And it is there only if what is read back was seen to compute the
//! same: of some operations the plugin does not write all it has to know, and others it does not read.
//!
//! A compiled model names native operations, so it is read by a core of its own ([`Core::importer`]): no other core knows these
//! operations, and no file but those of the private folder (`kept/folder.rs`) can name them.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Default;

use super::folder::PrivateFolder;
use super::{Kept, fingerprint, probe};
use crate::attention::Attention;
use crate::runtime::{CompiledModel, Core, version};
use crate::{Error, memory, processor};

/// Times its file that a compiled model takes when it is tried, with room for the rest.
const TRYING_FACTOR: u64 = 2;

/// After the plugin's bytes: their hash, and the facts.
const TAIL_BYTES: u64 = 16 + 8 + 8;

/// What is to be known of a compiled model beside itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Bytes that its integer weights take in f32; 0 if it has none.
    pub(crate) unpacked_bytes: u64,
    /// Whether the plugin is to compute in f32 whatever it is asked for: all that is much to compute is our own, and does
    /// as was asked.
    pub(crate) is_around_f32: bool,
}

impl Facts {
    /// The properties that the plugin is given.
    pub(crate) fn properties(self, asked: &[(String, String)]) -> Vec<(String, String)> {
        const PRECISION: &str = "INFERENCE_PRECISION_HINT";
        let mut all = asked.to_vec();
        if self.is_around_f32 {
            all.retain(|(key, _)| key != PRECISION);
            all.push((PRECISION.to_owned(), "f32".to_owned()));
        }
        all
    }
}

/// Where one graph is kept as it was compiled for one device, on one processor.
pub(crate) struct KeptCompiled {
    folder: Arc<PrivateFolder>,
    name: String,
    device: String,
    properties: Vec<(String, String)>,
}

impl KeptCompiled {
    /// Of the graph that is or would be kept as `graph`. `None` for devices whose plugins are not known to take back what
    /// they write.
    pub(crate) fn of(
        graph: &Kept,
        device: &str,
        properties: &[(String, String)],
        attention: Attention,
    ) -> Option<Self> {
        if device != "CPU" {
            return None;
        }
        let mut hash = Xxh3Default::new();
        let words = [graph.name.clone(), version(), processor::identity(), format!("{attention:?}")];
        let properties_words = properties.iter().flat_map(|(key, value)| [key.clone(), value.clone()]);
        for word in words.into_iter().chain(properties_words) {
            hash.update(&(word.len() as u64).to_le_bytes());
            hash.update(word.as_bytes());
        }
        Some(Self {
            folder: Arc::clone(&graph.folder),
            name: format!("compiled-{:032x}", hash.digest128()),
            device: device.to_owned(),
            properties: properties.to_vec(),
        })
    }

    pub(super) fn folder(&self) -> &Arc<PrivateFolder> {
        &self.folder
    }

    /// The compiled model, if there is a sound one, and the core that it was read by.
    pub(crate) fn read(&self) -> Option<(CompiledModel, Facts, Arc<Core>)> {
        let path = self.folder.file(&self.name);
        if !path.is_file() {
            return None;
        }
        let read = || {
            let (bytes, facts) = check(&path, &self.name).map_err(|error| error.to_string())?;
            let runtime = |error: Error| error.chain();
            let core = Core::importer().map_err(runtime)?;
            let properties = facts.properties(&self.properties);
            let compiled = core.import((&path, bytes), &self.device, &properties).map_err(runtime)?;
            Ok((compiled, facts, Arc::new(core)))
        };
        match read() {
            Ok(found) => {
                self.folder.touch(&self.name);
                Some(found)
            }
            Err(error) => {
                let error: String = error;
                let file = self.folder.shown(&self.name);
                tracing::warn!(error, file = %file.display(), "failed to read a cached compiled model");
                None
            }
        }
    }

    /// Keeps a compiled model, if it computes the same once it is read back. A failure (a full disk) is logged and leaves
    /// nothing behind.
    pub(super) fn write(&self, compiled: Arc<CompiledModel>, facts: Facts) {
        let part = self.folder.unfinished(&self.name);
        if let Err(why) = self.try_write(&part, compiled, facts) {
            // Nothing to be done if even this fails.
            let _ = fs::remove_file(self.folder.file(&part));
            let file = self.folder.shown(&self.name);
            tracing::warn!(why, file = %file.display(), "the compiled model is not cached");
        }
    }

    fn try_write(&self, part: &str, compiled: Arc<CompiledModel>, facts: Facts) -> Result<(), String> {
        let io = |error: std::io::Error| error.to_string();
        let runtime = |error: Error| error.chain();
        let path = self.folder.file(part);
        compiled.export(&path).map_err(runtime)?;
        let bytes = seal(&path, &self.name, facts).map_err(io)?;
        if memory::available_bytes().is_none_or(|free| free < TRYING_FACTOR * bytes as u64) {
            return Err("there is too little memory to try it".to_owned());
        }
        let properties = facts.properties(&self.properties);
        let core = Arc::new(Core::importer().map_err(runtime)?);
        let again = core.import((&path, bytes), &self.device, &properties).map_err(runtime)?;
        let read = probe::logits(Arc::clone(&core), Arc::new(again)).map_err(runtime)?;
        if read != probe::logits(core, compiled).map_err(runtime)? {
            return Err("it does not compute the same once it is read back".to_owned());
        }
        self.folder.finish(part, &self.name).map_err(io)
    }
}

/// Adds the tail to what the plugin has written; answers how many bytes that is.
fn seal(path: &Path, name: &str, facts: Facts) -> std::io::Result<usize> {
    let mut file = File::options().read(true).append(true).open(path)?;
    let bytes = file.metadata()?.len();
    let hash = seal_hash(&mut file, bytes, name)?;
    file.write_all(&hash.to_le_bytes())?;
    file.write_all(&facts.unpacked_bytes.to_le_bytes())?;
    file.write_all(&u64::from(facts.is_around_f32).to_le_bytes())?;
    file.sync_data()?;
    usize::try_from(bytes).map_err(std::io::Error::other)
}

/// Answers how many bytes are the plugin's, and the facts, if the file is as [`seal`] has left it.
fn check(path: &Path, name: &str) -> std::io::Result<(usize, Facts)> {
    let spoilt = || std::io::Error::new(std::io::ErrorKind::InvalidData, "it is not as it was written");
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len().checked_sub(TAIL_BYTES).ok_or_else(spoilt)?;
    let found = seal_hash(&mut file, bytes, name)?;
    let mut tail = [0; TAIL_BYTES as usize];
    file.seek(SeekFrom::Start(bytes))?;
    file.read_exact(&mut tail)?;
    let (written, facts) = tail.split_at(16);
    if written != found.to_le_bytes() {
        return Err(spoilt());
    }
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| facts[at + byte]));
    let facts = Facts { unpacked_bytes: number(0), is_around_f32: number(8) != 0 };
    Ok((usize::try_from(bytes).map_err(|_| spoilt())?, facts))
}

/// The hash of what the plugin has written, and of the name under which it was: the file of one model does not pass for another's.
fn seal_hash(file: &mut File, bytes: u64, name: &str) -> std::io::Result<u128> {
    let mut hash = Xxh3Default::new();
    hash.update(&fingerprint::hash(file, bytes)?.to_le_bytes());
    hash.update(name.as_bytes());
    Ok(hash.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "compiled-1";

    #[test]
    fn what_is_not_as_it_was_written_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        let content: Vec<u8> = (0..3_000_000u32).map(|number| (number % 251) as u8).collect();
        fs::write(&path, &content).unwrap();
        assert!(check(&path, NAME).is_err(), "without a tail");
        let facts = Facts { unpacked_bytes: 7, is_around_f32: true };
        assert_eq!(seal(&path, NAME, facts).unwrap(), content.len());
        assert_eq!(check(&path, NAME).unwrap(), (content.len(), facts));
        assert!(check(&path, "compiled-2").is_err(), "the file of another model");
        let whole = fs::read(&path).unwrap();
        for spoil in [0, content.len() - 1, content.len() + 3] {
            let mut spoilt = whole.clone();
            spoilt[spoil] ^= 1;
            fs::write(&path, spoilt).unwrap();
            assert!(check(&path, NAME).is_err(), "byte {spoil}");
        }
        for length in [0, 5, 24, content.len(), whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(check(&path, NAME).is_err(), "{length} bytes");
        }
    }
}
