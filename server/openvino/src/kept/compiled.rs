//! Compiled models, kept for the next start, which then need not read, rewrite and compile. As with graphs, whatever is
//! wrong with one costs time, never the start.
//!
//! A file is what the plugin writes, then the hash of that and [`Facts`]: so nobody reads half of one, or what a disk has
//! spoilt. And it is there only if what is read back was seen to compute the same: of some operations the plugin does not
//! write all it has to know, and others it does not read.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use xxhash_rust::xxh3::Xxh3Default;

use super::{Kept, probe};
use crate::attention::Attention;
use crate::runtime::{CompiledModel, Core, version};
use crate::{Error, memory, processor};

/// Most compiled models in a folder. Those that were not used for longest go first.
const COMPILED_MAX: usize = 8;

/// Times its file that a compiled model takes when it is tried, with room for the rest.
const TRYING_FACTOR: u64 = 2;

/// After the plugin's bytes: their hash, and the facts.
const TAIL_BYTES: u64 = 16 + 8 + 8;

/// How the names of their files begin.
const PREFIX: &str = "compiled-";

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
    folder: PathBuf,
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
            folder: graph.folder.clone(),
            name: format!("{PREFIX}{:032x}", hash.digest128()),
            device: device.to_owned(),
            properties: properties.to_vec(),
        })
    }

    fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// The compiled model, if there is a sound one.
    pub(crate) fn read(&self, core: &Core) -> Option<(CompiledModel, Facts)> {
        let path = self.path();
        if !path.is_file() {
            return None;
        }
        let read = || {
            let (bytes, facts) = check(&path).map_err(|error| error.to_string())?;
            let compiled = core.import((&path, bytes), &self.device, &facts.properties(&self.properties));
            compiled.map(|compiled| (compiled, facts)).map_err(|error: Error| error.chain())
        };
        match read() {
            Ok(found) => {
                // So that it is not taken for one that nobody uses; if that fails it may be.
                let _ = File::options()
                    .append(true)
                    .open(&path)
                    .and_then(|file| file.set_modified(SystemTime::now()));
                Some(found)
            }
            Err(error) => {
                tracing::warn!(error, file = %path.display(), "cannot use the kept compiled model");
                None
            }
        }
    }

    /// Keeps a compiled model, if it computes the same once it is read back. A failure (a full disk) is logged and leaves
    /// nothing behind.
    pub(crate) fn write(&self, core: &Arc<Core>, compiled: Arc<CompiledModel>, facts: Facts) {
        let part = self.folder.join(format!("part-{}-{}", std::process::id(), self.name));
        if let Err(why) = self.try_write(&part, core, (compiled, facts)) {
            // Nothing to be done if even this fails.
            let _ = fs::remove_file(&part);
            tracing::warn!(why, folder = %self.folder.display(), "the compiled model is not kept");
        }
        if let Err(error) = remove_oldest(&self.folder, COMPILED_MAX) {
            tracing::warn!(%error, folder = %self.folder.display(), "cannot remove old compiled models");
        }
    }

    fn try_write(
        &self,
        part: &Path,
        core: &Arc<Core>,
        (compiled, facts): (Arc<CompiledModel>, Facts),
    ) -> Result<(), String> {
        let io = |error: std::io::Error| error.to_string();
        let runtime = |error: Error| error.chain();
        fs::create_dir_all(&self.folder).map_err(io)?;
        compiled.export(part).map_err(runtime)?;
        let bytes = seal(part, facts).map_err(io)?;
        if memory::available_bytes().is_none_or(|free| free < TRYING_FACTOR * bytes as u64) {
            return Err("there is too little memory to try it".to_owned());
        }
        let properties = facts.properties(&self.properties);
        let again = core.import((part, bytes), &self.device, &properties).map_err(runtime)?;
        let read = probe::logits(Arc::clone(core), Arc::new(again)).map_err(runtime)?;
        if read != probe::logits(Arc::clone(core), compiled).map_err(runtime)? {
            return Err("it does not compute the same once it is read back".to_owned());
        }
        fs::rename(part, self.path()).map_err(io)
    }
}

/// Adds the tail to what the plugin has written; answers how many bytes that is.
fn seal(path: &Path, facts: Facts) -> std::io::Result<usize> {
    let mut file = File::options().read(true).append(true).open(path)?;
    let bytes = file.metadata()?.len();
    let hash = hash(&mut file, bytes)?;
    file.write_all(&hash.to_le_bytes())?;
    file.write_all(&facts.unpacked_bytes.to_le_bytes())?;
    file.write_all(&u64::from(facts.is_around_f32).to_le_bytes())?;
    file.sync_data()?;
    usize::try_from(bytes).map_err(std::io::Error::other)
}

/// Answers how many bytes are the plugin's, and the facts, if the file is as [`seal`] has left it.
fn check(path: &Path) -> std::io::Result<(usize, Facts)> {
    let spoilt = || std::io::Error::new(std::io::ErrorKind::InvalidData, "it is not as it was written");
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len().checked_sub(TAIL_BYTES).ok_or_else(spoilt)?;
    let found = hash(&mut file, bytes)?;
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

fn hash(file: &mut File, bytes: u64) -> std::io::Result<u128> {
    let mut hash = Xxh3Default::new();
    let mut buffer = vec![0; 1 << 20];
    file.seek(SeekFrom::Start(0))?;
    let mut rest = file.take(bytes);
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(hash.digest128()),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// Removes all but `most` compiled models of a folder.
fn remove_oldest(folder: &Path, most: usize) -> std::io::Result<()> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
            all.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    all.sort_unstable();
    for (_, path) in all.iter().rev().skip(most) {
        fs::remove_file(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_as_it_was_written_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        let content: Vec<u8> = (0..3_000_000u32).map(|number| (number % 251) as u8).collect();
        fs::write(&path, &content).unwrap();
        assert!(check(&path).is_err(), "without a tail");
        let facts = Facts { unpacked_bytes: 7, is_around_f32: true };
        assert_eq!(seal(&path, facts).unwrap(), content.len());
        assert_eq!(check(&path).unwrap(), (content.len(), facts));
        let whole = fs::read(&path).unwrap();
        for spoil in [0, content.len() - 1, content.len() + 3] {
            let mut spoilt = whole.clone();
            spoilt[spoil] ^= 1;
            fs::write(&path, spoilt).unwrap();
            assert!(check(&path).is_err(), "byte {spoil}");
        }
        for length in [0, 5, 24, content.len(), whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(check(&path).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn those_that_were_not_used_for_longest_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let name = |number: u64| folder.path().join(format!("{PREFIX}{number}"));
        for number in 0..5 {
            let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs((number * 3) % 5);
            File::create(name(number)).unwrap().set_modified(time).unwrap();
        }
        File::create(folder.path().join("graph-0")).unwrap();
        remove_oldest(folder.path(), 2).unwrap();
        let left: Vec<u64> = (0..5).filter(|&number| name(number).exists()).collect();
        assert_eq!(left, [1, 3], "of times 0 3 1 4 2");
        assert!(folder.path().join("graph-0").exists());
    }
}
