//! One number for the weights of a model, however they are read.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Device, Format};
use qurl_model::compute::{Base, Network, NetworkOptions};
use qurl_model::hf;
use qurl_quant::checksum::{Summed, files, host_params};
use std::path::Path;
use std::sync::Arc;

/// Read at once, from files leaf by leaf, and as they pass while a network is packed; tied and with a value
/// head that the network does not ask for.
#[test]
fn files_have_the_checksum_of_their_numbers() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../qurl-model/tests/goldens");
    for name in ["qwen2", "qwen2-untied", "critic"] {
        let whole = host_params(&hf::load(&goldens.join(name)).expect(name).params);
        let model = hf::open(&goldens.join(name)).expect(name);
        assert_eq!(files(&model).expect(name), whole, "{name}");
        let level = *Level::available().last().expect("every machine has a level");
        let queue = &mut Arc::new(Cpu::new(level, 2)).queue().expect("a queue");
        let mut leaves = Summed::<Cpu>::new(Base::Files(&model));
        let options = NetworkOptions::inference(&model.config, Format::Int8);
        Network::of_leaves(queue, &model.config, false, &mut leaves, options).expect(name);
        assert_eq!(leaves.total(queue), Ok(whole), "{name}");
    }
}
