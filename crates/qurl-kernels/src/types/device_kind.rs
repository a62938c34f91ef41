//! Where to compute.

use std::fmt;
use std::str::FromStr;

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// A GPU if there is one that can be used, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU; an error where there is none.
    Cuda,
}

impl DeviceKind {
    /// All choices.
    pub const ALL: [DeviceKind; 3] = [DeviceKind::Auto, DeviceKind::Cpu, DeviceKind::Cuda];

    /// The name used on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Auto => "auto",
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is not a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown device {found:?}; expected one of {}", DeviceKind::ALL.map(DeviceKind::name).join(", "))]
pub struct UnknownDeviceKind {
    /// The name given.
    pub found: String,
}

impl FromStr for DeviceKind {
    type Err = UnknownDeviceKind;

    fn from_str(name: &str) -> Result<Self, UnknownDeviceKind> {
        let known = DeviceKind::ALL.into_iter().find(|device| device.name() == name);
        known.ok_or_else(|| UnknownDeviceKind { found: name.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for device in DeviceKind::ALL {
            assert_eq!(device.name().parse(), Ok(device));
        }
        let error = "gpu".parse::<DeviceKind>().expect_err("not a device").to_string();
        assert!(error.contains("\"gpu\"") && error.contains("cuda"), "{error}");
    }
}
