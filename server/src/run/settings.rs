//! The settings of a server, which are derived from its flags.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::api_rules::ApiRules;
use crate::args::{Args, SleepArgs};
use crate::backend::{BackendConfig, KvSpill, OpenVinoConfig};
use crate::limits::HttpLimits;
use crate::media::MediaPolicy;
use crate::store::StoreConfig;

/// The settings of a server.
pub(super) struct Settings {
    pub(super) host: IpAddr,
    pub(super) ports: Ports,
    pub(super) replica_token_file: Option<PathBuf>,
    pub(super) drain_timeout: Duration,
    pub(super) limits: HttpLimits,
    pub(super) sleep: SleepArgs,
    pub(super) store: StoreConfig,
    pub(super) media: MediaPolicy,
    pub(super) backend: BackendConfig,
}

/// The ports to listen on.
pub(super) struct Ports {
    pub(super) http: u16,
    pub(super) grpc: u16,
    /// The additional port for metrics and probes.
    pub(super) admin: Option<u16>,
}

impl Args {
    /// Converts the flags to settings. The flags for logs and for the NUMA node take effect earlier.
    pub(super) fn into_settings(self) -> Settings {
        let Self {
            command: _,
            model,
            model_names,
            adapters,
            tool_parser,
            reasoning_parser,
            host,
            port,
            grpc_port,
            admin_port,
            replica_token_file,
            backend,
            device,
            numa_node: _,
            tensor_parallel_size,
            kv_cache_size,
            image_cache_size,
            kv_cache_precision,
            activation_precision,
            cache_dir,
            plugin_config,
            max_num_seqs,
            max_num_batched_tokens,
            max_chunk_tokens,
            max_itl,
            sparse_attention,
            kv_eviction_tokens,
            max_model_len,
            no_prefix_caching,
            prompt_lookup,
            draft_model,
            ovms_compat,
            log: _,
            log_format: _,
            limits,
            media,
            spill,
            store,
            sleep,
            sim,
        } = self;
        Settings {
            host,
            ports: Ports { http: port, grpc: grpc_port, admin: admin_port },
            replica_token_file,
            drain_timeout: limits.drain_timeout,
            limits: limits.http(),
            sleep,
            store: store.config(),
            media,
            backend: BackendConfig {
                backend,
                model,
                model_names,
                adapters,
                tool_parser: tool_parser.given(),
                reasoning_parser: reasoning_parser.given(),
                openvino: OpenVinoConfig {
                    device,
                    kv_cache_size: kv_cache_size.map(|size| size.0),
                    kv_cache_precision,
                    activation_precision,
                    cache_dir,
                    plugin_config,
                    tensor_parallel_size,
                    sparse_attention,
                },
                sim,
                max_num_seqs,
                max_num_batched_tokens,
                max_chunk_tokens,
                max_itl,
                max_queue: limits.max_queue,
                max_model_len,
                prefix_caching: !no_prefix_caching,
                kv_eviction_tokens,
                prompt_lookup,
                api_rules: if ovms_compat { ApiRules::Ovms } else { ApiRules::OpenAi },
                draft_model,
                kv_spill: spill.kv_spill_dir.map(|dir| KvSpill { dir, bytes: spill.kv_spill_bytes.0 }),
                max_tokenizer_memory: limits.max_tokenizer_memory.to_usize(),
                max_image_memory: limits.max_image_memory.to_usize(),
                image_cache_size: image_cache_size.0,
            },
        }
    }
}
