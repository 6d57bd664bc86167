//! The memory of the KV cache: its layout, its size, and copies of its blocks.

use server_engine::CacheLayout;
use server_scheduler::{BlockCopy, BlockId};

use crate::Error;
use crate::runtime::{InferRequest, Port, Tensor};

/// The key and value tensors of all layers.
pub(crate) struct KvCache {
    tensors: Vec<CacheTensor>,
}

/// The keys or the values of one layer.
struct CacheTensor {
    input: String,
    tensor: Tensor,
    block_bytes: usize,
}

/// The cache inputs of a compiled model.
pub(crate) struct CachePorts {
    ports: Vec<Port>,
    /// Number of tokens in a block.
    pub(crate) block_tokens: u32,
    /// Bytes of one block, summed over all layers.
    pub(crate) block_bytes: u64,
    /// The largest number of KV heads of a layer.
    pub(crate) kv_heads: usize,
}

impl CachePorts {
    /// Finds the cache among the inputs of a compiled model and reads its layout.
    ///
    /// # Errors
    /// There is no cache, or its blocks are empty or have no static size.
    pub(crate) fn find(inputs: &[Port]) -> Result<Self, Error> {
        let ports: Vec<Port> = inputs
            .iter()
            .filter(|port| port.name.starts_with("key_cache.") || port.name.starts_with("value_cache."))
            .cloned()
            .collect();
        let unusable = |why: &str| Error::Unsupported(format!("its KV cache {why}"));
        let value = ports
            .iter()
            .find(|port| port.name.starts_with("value_cache."))
            .ok_or_else(|| unusable("is missing: the model has no attention that can be paged"))?;
        // All known devices store values as [blocks, heads, tokens, head size]. Keys may be transposed, so the number
        // of tokens is read from the values.
        let block_tokens = value
            .shape
            .get(2)
            .copied()
            .flatten()
            .and_then(|tokens| u32::try_from(tokens).ok())
            .filter(|tokens| *tokens > 0)
            .ok_or_else(|| unusable("has blocks whose size is not static"))?;
        let (mut block_bytes, mut kv_heads) = (0, 1);
        for port in &ports {
            if port.shape.iter().skip(1).any(|size| size.is_some_and(|size| size < 1)) {
                return Err(unusable(&format!("has an empty {}: its shape is {:?}", port.name, port.shape)));
            }
            // Let the runtime compute the size, because it knows the widths of all element types.
            block_bytes += Tensor::new(port.element, &shape(port, 1)?)?.bytes()? as u64;
            kv_heads = kv_heads.max(shape(port, 1)?[1] as usize);
        }
        Ok(Self { ports, block_tokens, block_bytes, kv_heads })
    }

    pub(crate) fn allocate(&self, blocks: u32) -> Result<KvCache, Error> {
        let mut tensors = Vec::with_capacity(self.ports.len());
        for port in &self.ports {
            let tensor = Tensor::new(port.element, &shape(port, i64::from(blocks))?)?;
            let block_bytes = tensor.bytes()? / blocks as usize;
            tensors.push(CacheTensor { input: port.name.clone(), tensor, block_bytes });
        }
        Ok(KvCache { tensors })
    }

    /// Returns a description of the format of a block. The blocks of two models or runtimes are not compatible if their
    /// descriptions differ.
    pub(crate) fn describe(&self) -> String {
        let port = |port: &Port| format!("{} {:?} {:?}", port.name, port.element, port.shape);
        self.ports.iter().map(port).collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn layout(&self, blocks_total: u32, vocabulary: u32) -> CacheLayout {
        let Self { block_tokens, block_bytes, .. } = *self;
        CacheLayout { block_tokens, blocks_total, block_bytes, vocabulary }
    }
}

fn shape(port: &Port, blocks: i64) -> Result<Vec<i64>, Error> {
    port.shape
        .iter()
        .enumerate()
        .map(|(axis, size)| if axis == 0 { Some(blocks) } else { *size })
        .collect::<Option<Vec<_>>>()
        .filter(|shape| shape.len() > 1)
        .ok_or_else(|| {
            Error::Unsupported(format!(
                "its {} has fewer than two dimensions, or its dimensions after the first are not static",
                port.name
            ))
        })
}

impl KvCache {
    /// Binds the cache to a request of its model. Several requests may be bound to the cache if they run one after the
    /// other.
    pub(crate) fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        self.tensors.iter().try_for_each(|each| request.set(&each.input, &each.tensor))
    }

    /// Returns the whole pages of the memory to the system, which discards their content. These pages contain zeros
    /// when they are accessed again.
    pub(crate) fn discard(&mut self) -> Result<(), Error> {
        self.tensors.iter_mut().try_for_each(|each| each.tensor.discard())
    }

    /// Copies the content of a block, tensor after tensor, into `bytes`.
    pub(crate) fn read(&self, block: BlockId, bytes: &mut [u8]) -> Result<(), Error> {
        let mut rest = bytes;
        for CacheTensor { tensor, block_bytes, .. } in &self.tensors {
            let (to, others) = rest.split_at_mut(*block_bytes);
            tensor.copy_out(block.0 as usize * block_bytes, to)?;
            rest = others;
        }
        Ok(())
    }

    /// Writes the content of a block, in the format of [`Self::read`].
    pub(crate) fn write(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), Error> {
        let mut rest = bytes;
        for CacheTensor { tensor, block_bytes, .. } in &mut self.tensors {
            let (from, others) = rest.split_at(*block_bytes);
            tensor.copy_in(block.0 as usize * *block_bytes, from)?;
            rest = others;
        }
        Ok(())
    }

    /// Copies a block to another block in every layer.
    pub(crate) fn copy(&mut self, copy: BlockCopy) -> Result<(), Error> {
        for CacheTensor { tensor, block_bytes, .. } in &mut self.tensors {
            let bytes = *block_bytes;
            tensor.copy_within(copy.from.0 as usize * bytes, copy.to.0 as usize * bytes, bytes)?;
        }
        Ok(())
    }
}
