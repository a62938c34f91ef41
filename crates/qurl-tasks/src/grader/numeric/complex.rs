//! Complex numbers: only what the evaluation needs.

/// A complex number.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Complex {
    pub re: f64,
    pub im: f64,
}

impl Complex {
    /// A real number.
    pub fn real(re: f64) -> Complex {
        Complex { re, im: 0.0 }
    }

    /// Whether the imaginary part is exactly zero.
    pub fn is_real(&self) -> bool {
        self.im == 0.0
    }

    /// Whether both parts are finite.
    pub fn is_finite(&self) -> bool {
        self.re.is_finite() && self.im.is_finite()
    }

    /// Absolute value.
    pub fn abs(self) -> f64 {
        self.re.hypot(self.im)
    }

    /// `self + other`
    pub fn plus(self, other: Complex) -> Complex {
        Complex { re: self.re + other.re, im: self.im + other.im }
    }

    /// `self - other`
    pub fn minus(self, other: Complex) -> Complex {
        Complex { re: self.re - other.re, im: self.im - other.im }
    }

    /// `self · other`
    pub fn times(self, other: Complex) -> Complex {
        Complex { re: self.re * other.re - self.im * other.im, im: self.re * other.im + self.im * other.re }
    }

    /// `self / other`, unless `other` is zero.
    pub fn over(self, other: Complex) -> Option<Complex> {
        let size = other.re * other.re + other.im * other.im;
        (size > 0.0).then(|| Complex {
            re: (self.re * other.re + self.im * other.im) / size,
            im: (self.im * other.re - self.re * other.im) / size,
        })
    }

    /// e^self
    pub fn exp(self) -> Complex {
        let size = self.re.exp();
        Complex { re: size * self.im.cos(), im: size * self.im.sin() }
    }

    /// Principal logarithm.
    pub fn ln(self) -> Complex {
        Complex { re: self.abs().ln(), im: self.im.atan2(self.re) }
    }

    /// Principal power; whole exponents by multiplication.
    pub fn power(self, exponent: Complex) -> Complex {
        if exponent.is_real() && exponent.re.fract() == 0.0 && exponent.re.abs() <= 64.0 {
            let mut product = Complex::real(1.0);
            for _ in 0..exponent.re.abs() as u32 {
                product = product.times(self);
            }
            if exponent.re < 0.0 {
                return Complex::real(1.0).over(product).unwrap_or(Complex::real(f64::NAN));
            }
            return product;
        }
        if self.abs() == 0.0 {
            return Complex::real(if exponent.re > 0.0 { 0.0 } else { f64::NAN });
        }
        self.ln().times(exponent).exp()
    }

    /// Sine.
    pub fn sin(self) -> Complex {
        Complex { re: self.re.sin() * self.im.cosh(), im: self.re.cos() * self.im.sinh() }
    }

    /// Cosine.
    pub fn cos(self) -> Complex {
        Complex { re: self.re.cos() * self.im.cosh(), im: -self.re.sin() * self.im.sinh() }
    }
}
