#define _GNU_SOURCE
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/mman.h>
static double now(){struct timespec t;clock_gettime(CLOCK_THREAD_CPUTIME_ID,&t);return t.tv_sec+1e-9*t.tv_nsec;}
static void*big(size_t n){char*p=mmap(0,n+(4<<20),3,34,-1,0);p=(char*)(((size_t)p+(2<<20)-1)&~(size_t)((2<<20)-1));madvise(p,n,MADV_HUGEPAGE);memset(p,1,n);return p;}
#define R 7
static int q[R*32], w[R*32]; static int sink; static const char*pf; static int pk;
static const char*pl[4]; static int ph; static inline __attribute__((always_inline)) void pfl(int n){ /* n in 0..63: two lines each */ const char*p=pl[n>>4]+(n&15)*128; if(ph==1){_mm_prefetch(p,_MM_HINT_T1);_mm_prefetch(p+64,_MM_HINT_T1);} else if(ph==0){_mm_prefetch(p,_MM_HINT_T0);_mm_prefetch(p+64,_MM_HINT_T0);} }
static inline __attribute__((always_inline)) void dots(int n0,const char*base,long step,const int*a,int words,int astep,__m512i acc[R][2],const char*base2){
  for(int i=0;i<words;i++){ pfl(n0+i); __m512i k0=_mm512_loadu_si512(base+i*step),k1=_mm512_loadu_si512(base2+i*step);
   __m512i e0=_mm512_srai_epi16(_mm512_slli_epi16(k0,8),8),o0=_mm512_srai_epi16(k0,8),e1=_mm512_srai_epi16(_mm512_slli_epi16(k1,8),8),o1=_mm512_srai_epi16(k1,8);
   _Pragma("GCC unroll 8") for(int r=0;r<R;r++){__m512i b=_mm512_set1_epi32(a[r*astep+2*i]);acc[r][0]=_mm512_dpwssd_epi32(acc[r][0],b,e0);acc[r][1]=_mm512_dpwssd_epi32(acc[r][1],b,e1);}
   _Pragma("GCC unroll 8") for(int r=0;r<R;r++){__m512i b=_mm512_set1_epi32(a[r*astep+2*i+1]);acc[r][0]=_mm512_dpwssd_epi32(acc[r][0],b,o0);acc[r][1]=_mm512_dpwssd_epi32(acc[r][1],b,o1);}
  }}
static __m512i out[R][8];
// one tile: 4 blocks of 16 tokens, keys 1024 B, values 1024 B each
static __attribute__((noinline)) void tile(const char**k,const char**v,int compute){
  if(!compute){ __m512i s=_mm512_setzero_si512(); for(int b=0;b<4;b++)for(int i=0;i<1024;i+=64){s=_mm512_add_epi32(s,_mm512_loadu_si512(k[b]+i));s=_mm512_add_epi32(s,_mm512_loadu_si512(v[b]+i));} out[0][0]=_mm512_add_epi32(out[0][0],s);return;}
  for(int p=0;p<2;p++){ __m512i acc[R][2]; _Pragma("GCC unroll 8") for(int r=0;r<R;r++)acc[r][0]=acc[r][1]=_mm512_setzero_si512();
   dots(16*p,k[2*p],64,q,16,32,acc,k[2*p+1]); _Pragma("GCC unroll 8") for(int r=0;r<R;r++){out[r][2*p]=acc[r][0];out[r][2*p+1]=acc[r][1];}}
  for(int p=0;p<2;p++){ __m512i acc[R][2]; _Pragma("GCC unroll 8") for(int r=0;r<R;r++)acc[r][0]=acc[r][1]=_mm512_setzero_si512();
   for(int b=0;b<4;b++) dots(32+16*p+4*b,v[b]+128*p,256,w+8*b,4,32,acc,v[b]+128*p+64); _Pragma("GCC unroll 8") for(int r=0;r<R;r++){out[r][4+2*p]=acc[r][0];out[r][5+2*p]=acc[r][1];}}
}
int main(){ long pages=32768; char*m=big(pages*4096); 
 for(int compute=0;compute<2;compute++) for(int mode=0;mode<14;mode++){ int step[]={0,128,64,64,64,64,128,64,1,1,1,1,1,1},far[]={1,1,1,2,4,1,2,8,1,1,2,2,4,4},hint[]={1,1,1,1,1,0,1,1,1,0,1,0,1,0};
  double best=1e9; for(int rep=0;rep<3;rep++){ double t=now();
   for(long seq=0;seq<64;seq++) for(int h=0;h<2;h++) for(long tl=0;tl<128;tl++){ const char*k[4],*v[4];
     for(int b=0;b<4;b++){ long pg=seq*512+tl*4+b; k[b]=m+pg*4096+h*2048; v[b]=k[b]+1024; }
     ph=2; if(step[mode]==1){ph=hint[mode]; for(int b=0;b<4;b++)pl[b]=m+((seq*512+tl*4+4*far[mode]+b)%pages)*4096+h*2048;} else if(step[mode]) for(int b=0;b<4;b++){ const char*p=m+((seq*512+tl*4+4*far[mode]+b)%pages)*4096+h*2048; for(int i=0;i<2048;i+=step[mode]) if(hint[mode])_mm_prefetch(p+i,_MM_HINT_T1);else _mm_prefetch(p+i,_MM_HINT_T0);}
     tile(k,v,compute);}
   t=now()-t; if(t<best)best=t;}
  printf("compute %d step %d far %d hint T%d: %.1f GB/s  %.0f ns/tile\n",compute,step[mode],far[mode],hint[mode],pages*4096/best/1e9,1e9*best/(pages/2));}
 // small: in cache
 double best=1e9; const char*k[4],*v[4]; for(int b=0;b<4;b++){k[b]=m+b*2048;v[b]=k[b]+1024;} for(int rep=0;rep<20;rep++){double t=now();for(int i=0;i<2000;i++)tile(k,v,1);t=now()-t;if(t<best)best=t;} printf("tile in L1: %.0f ns\n",1e9*best/2000);
}
