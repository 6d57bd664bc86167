//! Compiled models in the model cache. With a cached compiled model, a start neither reads, rewrites nor compiles the
//! graph.
//!
//! A file consists of the plugin's bytes, a hash, and the [`GraphProperties`]. The hash covers the rest of the file and
//! the file's name, so it detects incomplete, damaged and renamed files. A file is kept only if the model that is read
//! back computes the same logits as the original, because the plugin does not write all attributes of some operations,
//! and cannot read other operations back.
//!
//! A compiled model can name native operations, so a separate core ([`shim::import_core`]) reads it. No other core
//! knows these operations, and the server uses this core only for files in the private directory (`directory.rs`).

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Default;

use super::directory::PrivateDirectory;
use super::graph::GraphCacheEntry;
use super::{fingerprint, probe};
use crate::config::Config;
use crate::kernels::{ExpertSupport, GraphProperties, ProjectionKernels};
use crate::runtime::{CompiledModel, Core, version};
use crate::{Error, cpu, memory, shim};

/// The memory required to verify a compiled model, as a multiple of the size of its file.
const VERIFICATION_FACTOR: u64 = 2;

/// Number of bytes after the plugin's bytes: the hash and the properties of the graph.
const TAIL_BYTES: u64 = 16 + 3 * 8;

/// A compiled model that can be written to the cache.
pub(crate) struct CacheableModel {
    pub(crate) compiled: Arc<CompiledModel>,
    /// The properties of the graph from which the model was compiled.
    pub(crate) graph: GraphProperties,
    /// The properties that were passed to the plugin.
    pub(crate) properties: Vec<(String, String)>,
}

/// The cache entry of the model that is compiled from one graph for one device and one processor.
pub(crate) struct CompiledCacheEntry {
    directory: Arc<PrivateDirectory>,
    name: String,
    device: String,
}

impl CompiledCacheEntry {
    /// Returns the entry of the model that is compiled from `graph` with this configuration, or `None` for devices
    /// whose plugins are not known to read back what they write.
    pub(crate) fn new(
        graph: &GraphCacheEntry,
        config: &Config,
        projections: ProjectionKernels,
    ) -> Option<Self> {
        let Config { device, plugin_config, activation_precision, sparse_attention, block_scores, .. } =
            config;
        if device != "CPU" {
            return None;
        }
        let mut hash = Xxh3Default::new();
        let kernels = format!("{projections:?} {activation_precision:?} {sparse_attention:?} {block_scores}");
        let words = [graph.name().to_owned(), version(), cpu::identity(), kernels];
        let property_words = plugin_config.iter().flat_map(|(key, value)| [key.clone(), value.clone()]);
        for word in words.into_iter().chain(property_words) {
            hash.update(&(word.len() as u64).to_le_bytes());
            hash.update(word.as_bytes());
        }
        let name = format!("compiled-{:032x}", hash.digest128());
        Some(Self { directory: Arc::clone(graph.directory()), name, device: device.clone() })
    }

    pub(super) fn directory(&self) -> &Arc<PrivateDirectory> {
        &self.directory
    }

    /// Returns the compiled model, the properties of its graph and the core that has read the model, or `None` if the
    /// file does not exist or, with a warning, if it cannot be used. `properties` returns the plugin's properties for a
    /// model that was compiled from a graph with the given [`GraphProperties`].
    pub(crate) fn read(
        &self,
        properties: impl FnOnce(GraphProperties) -> Result<Vec<(String, String)>, Error>,
    ) -> Option<(CompiledModel, GraphProperties, Arc<Core>)> {
        let path = self.directory.file(&self.name);
        if !path.is_file() {
            return None;
        }
        let read = || {
            let (bytes, graph) = check(&path, &self.name).map_err(|error| error.to_string())?;
            let runtime = |error: Error| error.chain();
            let properties = properties(graph).map_err(runtime)?;
            let core = shim::import_core().map_err(runtime)?;
            let file = shim::CompiledFile { path: &path, bytes };
            let compiled = shim::import(&core, file, &self.device, &properties).map_err(runtime)?;
            Ok((compiled, graph, Arc::new(core)))
        };
        match read() {
            Ok(found) => {
                self.directory.touch(&self.name);
                Some(found)
            }
            Err(error) => {
                let error: String = error;
                let file = self.directory.shown(&self.name);
                tracing::warn!(error, file = %file.display(), "failed to read a cached compiled model");
                None
            }
        }
    }

    /// Writes a compiled model, and keeps the file if the model that is read back computes the same logits. A failure,
    /// such as a full disk, is logged, and the unfinished file is removed.
    pub(super) fn write(&self, model: CacheableModel) {
        let part = self.directory.unfinished(&self.name);
        if let Err(error) = self.try_write(&part, model) {
            // A file that cannot be removed now is evicted later.
            let _ = fs::remove_file(self.directory.file(&part));
            let file = self.directory.shown(&self.name);
            tracing::warn!(error, file = %file.display(), "failed to cache the compiled model");
        }
    }

    fn try_write(&self, part: &str, model: CacheableModel) -> Result<(), String> {
        let CacheableModel { compiled, graph, properties } = model;
        let io = |error: std::io::Error| error.to_string();
        let runtime = |error: Error| error.chain();
        let path = self.directory.file(part);
        shim::export(&compiled, &path).map_err(runtime)?;
        let bytes = seal(&path, &self.name, graph).map_err(io)?;
        if memory::available_bytes().is_none_or(|free| free < VERIFICATION_FACTOR * bytes as u64) {
            return Err(format!(
                "verifying the compiled model requires {} bytes of memory, but less is available, or the available \
                 amount is unknown",
                VERIFICATION_FACTOR * bytes as u64
            ));
        }
        let core = Arc::new(shim::import_core().map_err(runtime)?);
        let file = shim::CompiledFile { path: &path, bytes };
        let imported = shim::import(&core, file, &self.device, &properties).map_err(runtime)?;
        let found = probe::logits(Arc::clone(&core), Arc::new(imported)).map_err(runtime)?;
        if found != probe::logits(core, compiled).map_err(runtime)? {
            return Err("the model that was read back computes different logits".to_owned());
        }
        self.directory.finish(part, &self.name).map_err(io)
    }
}

/// Appends the tail to the plugin's bytes, and returns the number of the plugin's bytes.
fn seal(path: &Path, name: &str, graph: GraphProperties) -> std::io::Result<usize> {
    let mut file = File::options().read(true).append(true).open(path)?;
    let bytes = file.metadata()?.len();
    let GraphProperties { native_projections, native_attention, experts } = graph;
    let properties =
        [u64::from(native_projections), u64::from(native_attention), experts as u64].map(u64::to_le_bytes);
    let properties = properties.as_flattened();
    let hash = seal_hash(&mut file, bytes, name, properties)?;
    file.write_all(&hash.to_le_bytes())?;
    file.write_all(properties)?;
    file.sync_data()?;
    usize::try_from(bytes).map_err(std::io::Error::other)
}

/// Returns the number of the plugin's bytes and the properties of the graph. Fails if the content or the name of the
/// file has changed since [`seal`].
fn check(path: &Path, name: &str) -> std::io::Result<(usize, GraphProperties)> {
    let damaged = || std::io::Error::new(std::io::ErrorKind::InvalidData, "the file is damaged");
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len().checked_sub(TAIL_BYTES).ok_or_else(damaged)?;
    let mut tail = [0; TAIL_BYTES as usize];
    file.seek(SeekFrom::Start(bytes))?;
    file.read_exact(&mut tail)?;
    let (written, properties) = tail.split_at(16);
    if written != seal_hash(&mut file, bytes, name, properties)?.to_le_bytes() {
        return Err(damaged());
    }
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| properties[at + byte]));
    let graph = GraphProperties {
        native_projections: number(0) != 0,
        native_attention: number(8) != 0,
        experts: ExpertSupport::new(number(16)).ok_or_else(damaged)?,
    };
    Ok((usize::try_from(bytes).map_err(|_| damaged())?, graph))
}

/// The hash of the plugin's bytes, of the properties of the graph, and of the file's name, so that the file of one model
/// is not accepted as that of another.
fn seal_hash(file: &mut File, bytes: u64, name: &str, properties: &[u8]) -> std::io::Result<u128> {
    let mut hash = Xxh3Default::new();
    hash.update(&fingerprint::hash(file, bytes)?.to_le_bytes());
    hash.update(properties);
    hash.update(name.as_bytes());
    Ok(hash.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "compiled-1";

    #[test]
    fn damaged_and_renamed_files_are_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("one");
        let content: Vec<u8> = (0..3_000_000u32).map(|number| (number % 251) as u8).collect();
        fs::write(&path, &content).unwrap();
        assert!(check(&path, NAME).is_err(), "without a tail");
        let graph = GraphProperties {
            native_projections: false,
            native_attention: true,
            experts: ExpertSupport::Native,
        };
        assert_eq!(seal(&path, NAME, graph).unwrap(), content.len());
        assert_eq!(check(&path, NAME).unwrap(), (content.len(), graph));
        assert!(check(&path, "compiled-2").is_err(), "the file of another model");
        let whole = fs::read(&path).unwrap();
        // The last position is that of `native_projections`.
        for position in [0, content.len() - 1, content.len() + 3, content.len() + 16] {
            let mut damaged = whole.clone();
            damaged[position] ^= 1;
            fs::write(&path, damaged).unwrap();
            assert!(check(&path, NAME).is_err(), "byte {position}");
        }
        for length in [0, 5, 24, content.len(), whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(check(&path, NAME).is_err(), "{length} bytes");
        }
    }
}
