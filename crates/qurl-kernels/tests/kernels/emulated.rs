//! The tests of the CUDA backend on devices that are emulated (`benches/gpu/emulate`), at night: kernels run
//! to their last line where there is no GPU, in other orders of threads and with work in the background done
//! as late as it may be, where a GPU has one order.

use std::path::Path;
use std::process::Command;

/// A device: compute capability, SMs, order of threads, what is late (a sum of 1: copies in the background,
/// 2: MMAs, 4: the work of streams; 8: kernels begin early).
type Device = [&'static str; 4];

/// What has only instructions of every tensor core.
const AMPERE: [Device; 2] = [["80", "16", "0", "0"], ["80", "5", "7", "1"]];
/// Ranges that are whole tiles, that share tiles, and that begin anywhere.
const HOPPER: [Device; 3] = [["90", "16", "0", "0"], ["90", "4", "7", "3"], ["90", "6", "3", "2"]];

/// Less shared memory for a block.
const ADA: Device = ["89", "16", "3", "1"];

/// A command on a device.
fn on(device: Device, program: &Path) -> Command {
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/gpu/emulate/run.sh");
    let [architecture, sms, seed, late] = device;
    let mut command = Command::new(run);
    command.arg(program).env("EMULATE_ARCH", architecture).env("EMULATE_SMS", sms);
    command.env("EMULATE_SEED", seed).env("EMULATE_LATE", late);
    command
}

/// Runs a test of this program on a device, on the cases whose names begin so. The driver refuses nothing,
/// not even what its caller would keep to itself.
fn hold(device: Device, test: &str, cases: &str) {
    let mut command = on(device, &std::env::current_exe().expect("this program"));
    command.args(["--exact", "--test-threads", "1", test]).env("QURL_CASES", cases);
    // What older devices have is another device.
    command.env("QURL_GENERATION", "as it is");
    let output = command.output().expect("bash and g++");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let passed = output.status.success() && text.contains("1 passed") && !errors.contains("emulator:");
    assert!(passed, "{test} on {device:?}: {}\n{text}\n{errors}", output.status);
}

fn at_night() -> bool {
    let compiler = || Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success());
    let runs = std::env::var_os("QURL_NIGHTLY").is_some() && cfg!(target_arch = "x86_64") && compiler();
    if !runs {
        eprintln!("skipped: QURL_NIGHTLY runs it, with g++ on x86-64");
    }
    runs
}

/// Of linear layers in every format: against naive twins, against the CPU and at other batches.
fn hold_gemms(device: Device) {
    for format in ["bf16", "int8", "fp8", "int4", "nvfp4"] {
        hold(device, "cuda::op_table", &format!("linear {format}"));
    }
    for test in [
        "cuda::four_bit_gemms_equal_the_cpu",
        "cuda::eight_bit_gemms_equal_the_cpu",
        "cuda::gemms_do_not_depend_on_the_batch",
        "cuda_fused::an_mlp_equals_its_parts_and_does_not_depend_on_the_batch",
    ] {
        hold(device, test, "");
    }
}

#[test]
fn gemms_of_every_tensor_core() {
    AMPERE.into_iter().filter(|_| at_night()).for_each(hold_gemms);
}

#[test]
fn gemms_of_hopper() {
    HOPPER.into_iter().filter(|_| at_night()).for_each(hold_gemms);
}

#[test]
fn attention_with_little_shared_memory() {
    let tests = ["stored_keys_and_values_equal_the_cpu", "windows_begin_in_any_tile_and_split"];
    for test in tests.into_iter().filter(|_| at_night()) {
        hold(ADA, &format!("cuda_attention::{test}"), "");
    }
}

/// What the driver refuses is refused here, and what is issued may be done late.
#[test]
fn the_emulated_driver_keeps_the_rules() {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/gpu/emulate/rules.py");
    let python = || Command::new("python3").arg("--version").output().is_ok_and(|out| out.status.success());
    for device in [["80", "16", "0", "0"], ["90", "16", "0", "12"]] {
        if at_night() && python() {
            let output = on(device, &rules).output().expect("bash and python3");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{device:?}: {errors}");
        }
    }
}

/// Steps and results while the host is as far ahead of the device as it may be.
#[test]
fn steps_on_streams_that_are_late() {
    let tests =
        ["owners_have_steps_of_their_own", "fetched_tokens_outlive_the_next_sample", "updates_equal_the_cpu"];
    for test in tests.into_iter().filter(|_| at_night()) {
        for device in [["80", "16", "0", "4"], ["90", "16", "3", "15"]] {
            hold(device, &format!("cuda::{test}"), "");
        }
    }
}
