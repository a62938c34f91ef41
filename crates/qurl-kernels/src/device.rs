//! Where to compute.

use std::fmt;
use std::str::FromStr;

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// A GPU if there is one that can be used, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU; an error where there is none.
    Cuda,
}

impl Device {
    /// All choices.
    pub const ALL: [Device; 3] = [Device::Auto, Device::Cpu, Device::Cuda];

    /// The name used on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Device::Auto => "auto",
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is not a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown device {found:?}; expected one of {}", Device::ALL.map(Device::name).join(", "))]
pub struct UnknownDevice {
    /// The name given.
    pub found: String,
}

impl FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        let known = Device::ALL.into_iter().find(|device| device.name() == name);
        known.ok_or_else(|| UnknownDevice { found: name.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for device in Device::ALL {
            assert_eq!(device.name().parse(), Ok(device));
        }
        let error = "gpu".parse::<Device>().expect_err("not a device").to_string();
        assert!(error.contains("\"gpu\"") && error.contains("cuda"), "{error}");
    }
}
