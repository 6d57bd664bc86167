use super::*;

const AVX2: CpuFeatures = CpuFeatures { avx2: true, ..NO_FEATURES };
const AVX_VNNI: CpuFeatures = CpuFeatures { avx_vnni: true, ..AVX2 };
const AVX512: CpuFeatures = CpuFeatures { avx512: true, ..AVX2 };
const AVX512_VNNI: CpuFeatures = CpuFeatures { avx512_vnni: true, ..AVX512 };
const AVX512_BF16: CpuFeatures = CpuFeatures { avx512_bf16: true, ..AVX512_VNNI };
const SLOW_BF16: CpuFeatures = CpuFeatures { slow_avx512_bf16: true, ..AVX512_BF16 };
const AMX: CpuFeatures = CpuFeatures { amx: true, ..SLOW_BF16 };
const NO_FEATURES: CpuFeatures = CpuFeatures {
    avx2: false,
    avx_vnni: false,
    avx512: false,
    avx512_vnni: false,
    avx512_bf16: false,
    slow_avx512_bf16: false,
    amx: false,
};

const NATIVE: GraphProperties =
    GraphProperties { native_projections: true, native_attention: true, experts: ExpertSupport::Absent };
const PARTLY_NATIVE: GraphProperties = GraphProperties { native_projections: false, ..NATIVE };
const PLUGIN_ATTENTION: GraphProperties = GraphProperties { native_attention: false, ..NATIVE };

/// The inputs of a plan. [`Case::new`] selects the CPU device, a u8 cache and no options.
#[derive(Clone)]
struct Case {
    options: KernelOptions,
    device: DeviceOptions,
    cpu: CpuFeatures,
    graph: GraphProperties,
}

impl Case {
    fn new(inference_precision: &str, cpu: CpuFeatures, graph: GraphProperties) -> Self {
        let options = KernelOptions {
            sparse_attention: None,
            block_scores: false,
            activation_precision: ActivationPrecision::Auto,
            has_adapters: false,
        };
        let device = DeviceOptions {
            is_cpu: true,
            inference_precision: inference_precision.to_owned(),
            kv_cache_precision: "u8".to_owned(),
            ..DeviceOptions::default()
        };
        Self { options, device, cpu, graph }
    }

    /// Returns the plan as text, or the error.
    fn plan(&self) -> String {
        match plan_kernels(&self.options, &self.device, self.cpu, self.graph) {
            Ok(plan) => format!("{plan}{}", if plan.is_native { " (all native)" } else { "" }),
            Err(error) => error.to_string(),
        }
    }
}

#[test]
fn an_image_encoder_has_native_projections_and_attention_and_computes_the_rest_in_f32() {
    // `device` and `plugin` are the precisions of the device and of the plugin's operations.
    let plan = |device: &str, plugin: &str, cpu| {
        let Case { options, device, .. } = Case::new(device, cpu, NATIVE);
        let EncoderPlan { projections, attention } = plan_encoder(&options, &device, cpu, plugin);
        (projections.map(|projections| projections.to_string()), attention)
    };
    let native = |isa: &str| Some(format!("native {isa}, int16 products, f32 activations"));
    assert_eq!(plan("f32", "f32", AVX2), (native("avx2"), None));
    assert_eq!(plan("f32", "f32", AMX), (native("avx512_vnni"), None));
    assert_eq!(plan("bf16", "f32", AVX512_BF16), (native("avx512_vnni"), Some(Isa::Avx512Bf16)));
    assert_eq!(plan("bf16", "f32", SLOW_BF16), (native("avx512_vnni"), None));
    let amx = Some("native amx_bf16, bf16 products, f32 activations".to_owned());
    assert_eq!(plan("bf16", "f32", AMX), (amx, Some(Isa::Amx)));
    assert_eq!(plan("f32", "f32", NO_FEATURES), (None, None));
    assert_eq!(plan("bf16", "bf16", AMX), (None, None));
    let Case { options, device, .. } = Case::new("f32", AVX2, NATIVE);
    for device in [
        DeviceOptions { prefers_accuracy: true, ..device.clone() },
        DeviceOptions { configures_plugin_projections: true, ..device },
    ] {
        assert_eq!(plan_encoder(&options, &device, AVX2, "f32"), EncoderPlan::default());
    }
}

const F32_ATTENTION: &str = "attention: native avx2, u8 KV cache, f32 activations";

#[test]
fn the_fastest_instruction_set_of_the_processor_is_chosen() {
    for (cpu, projections, attention, attention_in_bf16) in [
        (NO_FEATURES, "plugin", "portable", "portable"),
        (AVX2, "native avx2, int16 products", "avx2", "avx2"),
        (AVX_VNNI, "native avx_vnni, int16 products", "avx2", "avx2"),
        (AVX512, "native avx2, int16 products", "avx512", "avx512"),
        (AVX512_VNNI, "native avx512_vnni, int16 products", "avx512", "avx512"),
        (AVX512_BF16, "native avx512_vnni, int16 products", "avx512", "avx512_bf16"),
        (SLOW_BF16, "native avx512_vnni, int16 products", "avx512", "avx512"),
        (AMX, "native amx_bf16, bf16 products", "avx512", "amx_bf16 (prompts in tiles, decodes in vectors)"),
    ] {
        for (precision, attention) in [("f32", attention), ("bf16", attention_in_bf16)] {
            let all = if cpu.avx2 { ", f32 activations (all native)" } else { "" };
            let plan = Case::new(precision, cpu, NATIVE).plan();
            let start = format!("projections: {projections}");
            assert!(plan.starts_with(&start), "{plan} does not start with {start}");
            let part = format!("attention: native {attention}, u8 KV cache{all}");
            assert!(plan.contains(&part), "{plan} does not contain {part}");
        }
    }
}

#[test]
fn precisions_follow_the_device_and_the_graph() {
    let projections =
        |activations: &str| format!("projections: native avx2, int16 products, {activations} activations");
    let attention =
        |activations: &str| format!("attention: native avx2, u8 KV cache, {activations} activations");
    for (precision, graph, expected) in [
        ("f32", NATIVE, format!("{}; {} (all native)", projections("f32"), attention("f32"))),
        ("f32", PARTLY_NATIVE, format!("{}; {}", projections("f32"), attention("f32"))),
        ("f32", PLUGIN_ATTENTION, format!("{}; attention: plugin", projections("f32"))),
        // A graph whose kernels are all native keeps f32 activations.
        ("bf16", NATIVE, format!("{}; {} (all native)", projections("f32"), attention("f32"))),
        ("bf16", PARTLY_NATIVE, format!("{}; {}", projections("bf16"), attention("bf16"))),
        ("bf16", PLUGIN_ATTENTION, format!("{}; attention: plugin", projections("bf16"))),
        // The native kernels do not read f16 activations.
        ("f16", NATIVE, format!("{}; {} (all native)", projections("f32"), attention("f32"))),
        ("f16", PARTLY_NATIVE, "projections: plugin; attention: plugin".to_owned()),
        ("f16", PLUGIN_ATTENTION, "projections: plugin; attention: plugin".to_owned()),
    ] {
        assert_eq!(Case::new(precision, AVX2, graph).plan(), expected, "{precision} {graph:?}");
    }
}

#[test]
fn the_activation_precision_selects_the_products_of_native_projections_only() {
    let mut case = Case::new("f32", AVX2, NATIVE);
    case.options.activation_precision = ActivationPrecision::Int8;
    assert_eq!(
        case.plan(),
        format!("projections: native avx2, int8 products, f32 activations; {F32_ATTENTION} (all native)")
    );
    case.device.configures_plugin_projections = true;
    assert_eq!(case.plan(), format!("projections: plugin; {F32_ATTENTION}"));
}

#[test]
fn the_configuration_can_select_the_plugin_kernels() {
    let native = Case::new("f32", AVX2, NATIVE);
    let changed = |change: &dyn Fn(&mut Case)| {
        let mut case = native.clone();
        change(&mut case);
        case.plan()
    };
    let plugin_projections = format!("projections: plugin; {F32_ATTENTION}");
    assert_eq!(changed(&|case| case.device.prefers_accuracy = true), plugin_projections);
    assert_eq!(changed(&|case| case.device.configures_plugin_projections = true), plugin_projections);
    let plugin_attention = "projections: native avx2, int16 products, f32 activations; attention: plugin";
    assert_eq!(changed(&|case| case.device.configures_plugin_cache = true), plugin_attention);
    assert_eq!(changed(&|case| case.device.kv_cache_precision = "i4".to_owned()), plugin_attention);
    assert_eq!(changed(&|case| case.device.is_cpu = false), "projections: plugin; attention: plugin");
    for precision in ["f32", "bf16", "f16", "u4"] {
        let plan = changed(&|case| case.device.kv_cache_precision = precision.to_owned());
        assert!(plan.contains(&format!("{precision} KV cache")), "{plan}");
    }
}

#[test]
fn options_of_the_native_attention_are_in_the_plan_or_an_error() {
    let mut case = Case::new("f32", AVX2, NATIVE);
    case.options.sparse_attention = Some(0.9);
    case.options.block_scores = true;
    assert_eq!(
        case.plan(),
        format!(
            "projections: native avx2, int16 products, f32 activations; {F32_ATTENTION}, sparse (attention mass 0.9), block scores (all native)"
        )
    );
    for (sparse_attention, block_scores) in [(Some(0.9), false), (None, true)] {
        case.options = KernelOptions { sparse_attention, block_scores, ..case.options };
        let refused = Case { graph: PLUGIN_ATTENTION, ..case.clone() }.plan();
        assert!(refused.contains("need the native attention kernels"), "{refused}");
        let mut gpu = case.clone();
        gpu.device.is_cpu = false;
        assert!(gpu.plan().contains("need the native attention kernels"), "{}", gpu.plan());
    }
}

#[test]
fn experts_use_the_kernels_of_native_projections() {
    let case = |experts, cpu| Case::new("f32", cpu, GraphProperties { experts, ..NATIVE });
    let native = "projections: native avx2, int16 products, f32 activations";
    let mixture = case(ExpertSupport::Native, AVX2);
    assert_eq!(mixture.plan(), format!("{native}; experts: native; {F32_ATTENTION} (all native)"));
    let mut configured = mixture;
    configured.device.configures_plugin_projections = true;
    assert_eq!(configured.plan(), format!("projections: plugin; experts: plugin; {F32_ATTENTION}"));
    let mut unsupported = case(ExpertSupport::Plugin, AVX2);
    unsupported.graph.native_projections = false;
    assert_eq!(unsupported.plan(), format!("{native}; experts: plugin; {F32_ATTENTION}"));
    let plan = case(ExpertSupport::Native, NO_FEATURES).plan();
    assert!(plan.starts_with("projections: plugin; experts: plugin; "), "{plan}");
    let mut partly = case(ExpertSupport::Native, AVX2);
    partly.graph.native_projections = false;
    assert_eq!(partly.plan(), format!("{native}; experts: native; {F32_ATTENTION}"));
    // The native kernels do not read f16 activations, so the plugin computes everything.
    partly.device.inference_precision = "f16".to_owned();
    assert_eq!(partly.plan(), "projections: plugin; experts: plugin; attention: plugin");
}

#[test]
fn adapters_in_native_projections_are_refused_where_these_cannot_be_used() {
    let mut case = Case::new("f16", AVX2, PLUGIN_ATTENTION);
    case.options.has_adapters = true;
    assert!(case.plan().contains("INFERENCE_PRECISION_HINT=f16"), "{}", case.plan());
    // If the native kernels do not support all projections, the adapters are in the graph.
    case.graph.native_projections = false;
    assert_eq!(case.plan(), "projections: plugin; attention: plugin");
    case.device.inference_precision = "bf16".to_owned();
    case.graph = PLUGIN_ATTENTION;
    assert_eq!(case.plan(), "projections: native avx2, int16 products, bf16 activations; attention: plugin");
}

#[test]
fn a_wholly_native_plan_makes_the_plugin_compute_in_f32() {
    let given = [("INFERENCE_PRECISION_HINT", "bf16"), ("INFERENCE_NUM_THREADS", "2")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
    let plan = |graph| {
        let case = Case::new("bf16", AVX2, graph);
        plan_kernels(&case.options, &case.device, case.cpu, case.graph).unwrap()
    };
    assert_eq!(plan(PARTLY_NATIVE).plugin_properties(&given), given);
    let [_, threads] = given.clone();
    let precision = ("INFERENCE_PRECISION_HINT".to_owned(), "f32".to_owned());
    assert_eq!(plan(NATIVE).plugin_properties(&given), [threads, precision]);
}
